// A line of the last minute, drawn as SVG. Gaps are moments without a value.

import { svg } from "./dom.js";

const WIDTH = 100;
const HEIGHT = 24;
export const NUM_POINTS = 60;

export class Sparkline {
  #points = [];
  #line = svg("path");
  #area = svg("path", { class: "area" });

  constructor(parent) {
    const root = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    });
    root.append(this.#area, this.#line);
    parent.append(root);
  }

  /** value: null where there is none now. */
  push(value) {
    this.#points.push(value);
    if (this.#points.length > NUM_POINTS) this.#points.shift();
    const highest = Math.max(...this.#points.map((point) => point ?? 0)) || 1;
    const first = NUM_POINTS - this.#points.length;
    const runs = [[]];
    this.#points.forEach((point, i) => {
      if (point === null) runs.push([]);
      else {
        const x = ((first + i) / (NUM_POINTS - 1)) * WIDTH;
        runs.at(-1).push([x, HEIGHT - 2 - (point / highest) * (HEIGHT - 4)]);
      }
    });
    const drawn = runs.filter((run) => run.length);
    this.#line.setAttribute("d", drawn.map(lineOf).join(""));
    this.#area.setAttribute("d", drawn.map(areaOf).join(""));
  }
}

// A single point gets a stem, else it would not be seen.
function lineOf(run) {
  const points = run.length > 1 ? run : [run[0], [run[0][0], HEIGHT]];
  return `M${points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}`;
}

function areaOf(run) {
  const [left] = run[0];
  const [right] = run.at(-1);
  return run.length > 1 ? `${lineOf(run)}L${right} ${HEIGHT}L${left} ${HEIGHT}Z` : "";
}
