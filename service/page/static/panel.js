// The panel beside the chat: draws what the service does now.

import { byId, element } from "./dom.js";
import { Rates, sum } from "./rates.js";
import { Sparkline } from "./sparkline.js";

const PHASES = ["extend", "decode", "verify"];
const NUM_TILES = 128;
const NO_VALUE = "–";
const UNKNOWN_LIMIT = "limit of this device not set";

const value = (name) => document.querySelector(`[data-value="${name}"]`);
const count = (number) => number.toLocaleString("en");

export class Panel {
  #rates = new Rates();
  #figures = new Map(PHASES.map((phase) => [phase, new Figure(phase)]));
  #tiles = makeTiles();
  #lines = new Map(
    [...document.querySelectorAll("[data-spark]")].map((place) => [
      place.dataset.spark,
      new Sparkline(place),
    ]),
  );

  /** state: a LiveState. counter: of the tokens that such a model is measured by. */
  show(state, counter) {
    const { replicas } = state;
    const { tokensPerSecond, phases } = this.#rates.update(replicas, counter);
    for (const [phase, figure] of this.#figures) figure.show(phases[phase]);
    this.#showMemory(replicas);
    this.#showDrafts(replicas);
    this.#showTotal("rate", tokensPerSecond, tokensPerSecond.toFixed(tokensPerSecond < 100 ? 1 : 0));
    for (const name of ["running", "waiting"]) {
      const total = sum(replicas, (replica) => replica[`num_${name}`]);
      this.#showTotal(name, total, count(total));
    }
    value("facts").textContent = factsOf(replicas);
  }

  #showTotal(name, number, text) {
    value(name).textContent = text;
    this.#lines.get(name).push(number);
  }

  #showMemory(replicas) {
    const total = sum(replicas, (replica) => replica.num_pages);
    const used = sum(replicas, (replica) => replica.num_used_pages);
    const cached = sum(replicas, (replica) => replica.num_evictable_pages);
    byId("flow").hidden = replicas.length > 0 && !total;
    if (!total) return;
    // What is there is seen, however little it is.
    const numUsed = Math.ceil((used / total) * NUM_TILES);
    const numCached = Math.ceil((cached / total) * NUM_TILES);
    this.#tiles.forEach((tile, i) => {
      tile.classList.toggle("used", i < numUsed);
      tile.classList.toggle("cached", i >= numUsed && i < numUsed + numCached);
    });
    value("used").textContent = count(used);
    value("cached").textContent = count(cached);
    value("free").textContent = count(total - used - cached);
    const perTile = Math.max(1, Math.round(total / NUM_TILES));
    value("scale").textContent = perTile === 1 ? "a page a tile" : `${count(perTile)} pages a tile`;
    const label = `${used} of ${total} pages in use, ${cached} kept for later`;
    byId("tiles").setAttribute("aria-label", label);
    showHits(replicas);
  }

  #showDrafts(replicas) {
    const drafts = sum(replicas, (replica) => replica.num_draft_tokens);
    if (!drafts) return;
    const right = sum(replicas, (replica) => replica.num_accepted_draft_tokens);
    const share = Math.round((100 * right) / drafts);
    value("drafts").textContent = `${share} % of ${count(drafts)} guesses were right.`;
  }
}

/** One phase: attention's time in a step, its line, its share of what the device could do. */
class Figure {
  #time = element("b", {}, NO_VALUE);
  #limit = element("p", { className: "limit" }, "");
  #fill = element("i");
  #meter = element("div", { className: "meter", hidden: true }, this.#fill);
  #line;

  constructor(phase) {
    const spark = element("div", { className: "spark" });
    this.#line = new Sparkline(spark);
    const time = element("div", {}, this.#time, element("small", {}, " ms a step"));
    document
      .querySelector(`[data-figure="${phase}"]`)
      .append(time, spark, this.#meter, this.#limit);
  }

  /** measured: null where the phase had no step since the last time; its last values stay. */
  show(measured) {
    this.#line.push(measured?.milliseconds ?? null);
    if (!measured) return;
    const { milliseconds, share } = measured;
    this.#time.textContent = milliseconds.toFixed(milliseconds < 10 ? 2 : 1);
    this.#meter.hidden = share === null;
    this.#limit.textContent =
      share === null ? UNKNOWN_LIMIT : `${percent(share)} of the roofline`;
    if (share !== null) this.#fill.style.width = `${100 * Math.min(1, share)}%`;
  }
}

const percent = (share) => `${(100 * share).toFixed(share < 0.095 ? 1 : 0)} %`;

function makeTiles() {
  const tiles = Array.from({ length: NUM_TILES }, () => element("i", { className: "tile" }));
  byId("tiles").append(...tiles);
  return tiles;
}

function showHits(replicas) {
  const prompts = sum(replicas, (replica) => replica.num_prompt_tokens);
  if (!prompts) return;
  const share = sum(replicas, (replica) => replica.num_cached_prompt_tokens) / prompts;
  value("hits").textContent = percent(share);
  const meter = byId("hits-meter");
  meter.setAttribute("aria-valuenow", String(Math.round(100 * share)));
  meter.firstElementChild.style.width = `${100 * share}%`;
}

function factsOf(replicas) {
  if (!replicas.length) return "No engine tells anything yet.";
  const backends = [...new Set(replicas.map((replica) => replica.attention_backend))];
  const [{ page_size: pageSize }] = replicas;
  const engines = replicas.length === 1 ? "1 engine" : `${replicas.length} engines`;
  const pages = pageSize ? ` · pages of ${pageSize} tokens` : "";
  return `${engines} · attention by ${backends.join(", ")}${pages}`;
}
