// An answer token by token: which characters each token wrote, how probable it was, what else was.

import { byId, element } from "./dom.js";

const CERTAIN = 0.9;
const LIKELY = 0.5;
const UNLIKELY = 0.1;

/** Gives each token its part of a text that grows.
 *
 * A token may be a part of a character, and some tokens (the end of a turn, marks around a call)
 * write nothing that the text has: those are passed over.
 */
export class Aligner {
  #decoder = new TextDecoder();
  #waiting = [];
  #text = "";
  #placed = 0;

  /** New text and new tokens; returns what is certain now: [{text, token}], in order. */
  push(text, tokens) {
    this.#text += text;
    this.#waiting.push(...tokens);
    const parts = [];
    while (this.#waiting.length) {
      const [token] = this.#waiting;
      const written = this.#decode(token);
      const rest = this.#text.slice(this.#placed);
      if (written && rest.length < written.length && written.startsWith(rest)) {
        token.written = written; // its text is still to come
        break;
      }
      this.#waiting.shift();
      if (!written || !rest.startsWith(written)) continue;
      parts.push({ text: written, token });
      this.#placed += written.length;
    }
    return parts;
  }

  /** The text behind the last token that was placed. */
  get rest() {
    return this.#text.slice(this.#placed);
  }

  #decode(token) {
    // Once only: the decoder keeps what is left of a character for the token after.
    token.written ??= token.bytes
      ? this.#decoder.decode(new Uint8Array(token.bytes), { stream: true })
      : token.token;
    return token.written;
  }
}

/** How sure the model was: 0 (certain) to 3 (a token it would hardly have written). */
export function sureness(probability) {
  if (probability >= CERTAIN) return 0;
  if (probability >= LIKELY) return 1;
  return probability >= UNLIKELY ? 2 : 3;
}

/** An element whose tokens show their probabilities by pointer, and by arrow keys when focused. */
export class TokenText {
  #aligner = new Aligner();
  #tail = document.createTextNode("");
  #tokens = new WeakMap();

  constructor() {
    this.element = element("div", { className: "text" }, this.#tail);
    this.element.addEventListener("pointerover", (event) => this.#show(event.target));
    this.element.addEventListener("pointerleave", hideTip);
    this.element.addEventListener("focusin", (event) => this.#show(event.target));
    this.element.addEventListener("focusout", hideTip);
    this.element.addEventListener("keydown", (event) => this.#move(event));
  }

  get text() {
    return this.element.textContent;
  }

  push(text, tokens) {
    for (const { text: written, token } of this.#aligner.push(text, tokens)) {
      const sure = String(sureness(Math.exp(token.logprob)));
      const span = element("span", { className: "token", dataset: { sure } }, written);
      span.tabIndex = this.element.querySelector(".token") ? -1 : 0;
      this.#tokens.set(span, token);
      this.#tail.before(span);
    }
    this.#tail.data = this.#aligner.rest;
    if (this.element.querySelector(".token")) {
      this.element.setAttribute("role", "group");
      this.element.setAttribute("aria-label", "Answer; arrow keys step through its tokens");
    }
  }

  #show(span) {
    const token = this.#tokens.get(span);
    if (token) showTip(span, token);
    else hideTip();
  }

  #move(event) {
    const here = event.target.closest(".token");
    const last = this.element.querySelector(".token:last-of-type");
    const next = {
      ArrowRight: here?.nextElementSibling,
      ArrowLeft: here?.previousElementSibling,
      Home: this.element.querySelector(".token"),
      End: last,
    }[event.key];
    if (event.key === "Escape") hideTip();
    if (!next?.classList.contains("token")) return;
    event.preventDefault();
    here.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

function showTip(span, token) {
  const tip = byId("tip");
  const others = token.top_logprobs.filter((other) => other.token !== token.token);
  const options = [token, ...others].sort((a, b) => b.logprob - a.logprob);
  tip.replaceChildren(
    element(
      "div",
      { className: "of" },
      element("span", {}, "Probability"),
      element("span", {}, percent(token.logprob)),
    ),
    ...options.map((option) => optionRow(option, option === token)),
  );
  tip.hidden = false;
  span.setAttribute("aria-describedby", "tip");
  place(tip, span.getClientRects()[0] ?? span.getBoundingClientRect());
}

function optionRow(option, isChosen) {
  const fill = element("i");
  fill.style.width = `${100 * Math.exp(option.logprob)}%`;
  const row = element(
    "div",
    { className: "option" },
    element("code", {}, visible(option.token)),
    element("span", { className: "bar" }, fill),
    element("span", { className: "percent" }, percent(option.logprob)),
  );
  if (isChosen) row.dataset.chosen = "";
  return row;
}

/** Below the token, or above it where there is no room; never outside the window. */
function place(tip, at) {
  const gap = 8;
  const left = Math.min(at.left, innerWidth - tip.offsetWidth - gap);
  const below = at.bottom + gap;
  const fits = below + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(gap, left)}px`;
  tip.style.top = `${fits ? below : Math.max(gap, at.top - tip.offsetHeight - gap)}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}
