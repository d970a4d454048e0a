// What attention computes, as a small picture: a row a token, a column a token that it looks at.

import { svg } from "./dom.js";

const SIZE = 6;
const CELL = 7;
const GAP = 0.4;

// Of a row and a column at or before it: computed now, computed before, or nothing.
const KIND = {
  extend: () => "now",
  memory: () => "past",
  decode: (row) => (row === SIZE - 1 ? "now" : "past"),
  verify: (row) => (row >= SIZE - 3 ? "now" : "past"),
};

export function drawGlyphs() {
  for (const place of document.querySelectorAll("[data-glyph]")) {
    place.append(place.dataset.glyph === "memory" ? columns() : triangle(KIND[place.dataset.glyph]));
  }
}

function triangle(kindOf) {
  const root = canvas();
  for (let row = 0; row < SIZE; row += 1) {
    for (let column = 0; column <= row; column += 1) root.append(cell(row, column, kindOf(row)));
  }
  return root;
}

/** Keys and values: one of each a token. */
function columns() {
  const root = canvas();
  for (let column = 0; column < SIZE; column += 1) {
    for (const row of [1, 2, 3.5, 4.5]) root.append(cell(row - 0.25, column, row < 3 ? "now" : "past"));
  }
  return root;
}

function canvas() {
  const side = SIZE * CELL;
  return svg("svg", { viewBox: `0 0 ${side} ${side}`, "aria-hidden": "true" });
}

function cell(row, column, kind) {
  return svg("rect", {
    x: column * CELL + GAP,
    y: row * CELL + GAP,
    width: CELL - 2 * GAP,
    height: CELL - 2 * GAP,
    rx: 1.4,
    class: kind,
  });
}
