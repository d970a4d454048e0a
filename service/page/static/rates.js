// From two states of the service to what happened between them. Counters come in, rates go out.

const PHASES = ["extend", "decode", "verify"];

/** Per replica, because each tells its numbers at moments of its own. */
export class Rates {
  #previous = new Map();
  #latest = new Map();

  /** replicas: of a LiveState. counter: of the tokens that are told by the second. Returns what the
   * page draws; a phase without steps is null. */
  update(replicas, counter) {
    const known = new Set(replicas.map((replica) => replica.replica));
    for (const name of this.#previous.keys()) {
      if (!known.has(name)) {
        this.#previous.delete(name);
        this.#latest.delete(name);
      }
    }
    for (const replica of replicas) this.#take(replica, counter);
    const latest = [...this.#latest.values()];
    return {
      tokensPerSecond: sum(latest, (rates) => rates.tokensPerSecond),
      phases: Object.fromEntries(PHASES.map((name) => [name, phaseOf(latest, name)])),
    };
  }

  #take(replica, counter) {
    const before = this.#previous.get(replica.replica);
    if (before && before.pushed_s === replica.pushed_s) return;
    this.#previous.set(replica.replica, replica);
    // The first state tells of all the time before it. An engine that began anew counts from 0.
    const isFirst = !before || replica.num_steps < before.num_steps;
    const numTokens = isFirst ? 0 : replica[counter] - before[counter];
    const seconds = isFirst ? 1 : replica.pushed_s - before.pushed_s;
    const old = isFirst ? [] : before.phases;
    this.#latest.set(replica.replica, {
      tokensPerSecond: numTokens / seconds,
      phases: new Map(replica.phases.map((phase) => [phase.phase, since(old, phase)])),
    });
  }
}

function since(phases, phase) {
  const old = phases.find((other) => other.phase === phase.phase);
  return {
    numSteps: phase.num_measured_steps - (old?.num_measured_steps ?? 0),
    seconds: phase.seconds - (old?.seconds ?? 0),
    least: phase.least_seconds === null ? null : phase.least_seconds - (old?.least_seconds ?? 0),
  };
}

function phaseOf(latest, name) {
  const parts = latest.map((rates) => rates.phases.get(name)).filter((part) => part?.numSteps > 0);
  if (!parts.length) return null;
  const seconds = sum(parts, (part) => part.seconds);
  const isKnown = parts.every((part) => part.least !== null);
  return {
    milliseconds: (1000 * seconds) / sum(parts, (part) => part.numSteps),
    share: isKnown ? sum(parts, (part) => part.least) / seconds : null,
  };
}

export function sum(items, of) {
  return items.reduce((total, item) => total + of(item), 0);
}
