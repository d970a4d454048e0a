// One turn of the conversation as the reader sees it.

import { element } from "./dom.js";
import { TokenText } from "./tokens.js";

/** What the user said. */
export function userTurn(text) {
  return element(
    "li",
    { className: "message user" },
    element("p", { className: "who" }, "You"),
    element("div", { className: "text" }, text),
  );
}

/** What a tool gave back. */
export function toolTurn(name, text) {
  return element(
    "li",
    { className: "message tool" },
    element("p", { className: "who" }, `Result of ${name}`),
    element("div", { className: "text" }, text),
  );
}

/** The model's turn while it comes in, chunk by chunk; `message` is what the API wants back. */
export class AssistantTurn {
  #text = new TokenText();
  #thinking = null;
  #calls = [];
  #caret = element("span", { className: "caret" });
  #stats = element("p", { className: "stats" });
  #startedMs = performance.now();
  #firstMs = 0;
  #lastMs = 0;
  #usage = null;
  finishReason = "";

  constructor(model) {
    const who = element("p", { className: "who" }, model);
    this.element = element(
      "li",
      { className: "message assistant" },
      who,
      this.#text.element,
      this.#caret,
      this.#stats,
    );
  }

  /** One chunk of the stream; returns the text that is new to a listener. */
  push(chunk) {
    if (chunk.usage) this.#usage = chunk.usage;
    const [choice] = chunk.choices;
    if (!choice) return "";
    this.#lastMs = performance.now();
    if (!this.#firstMs) this.#firstMs = this.#lastMs;
    const { content = "", reasoning_content: thought = "", tool_calls: calls = [] } = choice.delta;
    if (thought) this.#think(thought);
    // Tokens of thoughts and calls are none of this text's.
    const isText = !thought && !calls.length;
    this.#text.push(content, isText ? (choice.logprobs?.content ?? []) : []);
    for (const part of calls) this.#call(part);
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    return content;
  }

  /** The stream is over. onResult(call, text) is asked to go on with a tool's result. */
  end(onResult) {
    this.#caret.remove();
    this.#stats.textContent = this.#summary();
    for (const call of this.#whole) call.askForResult(onResult);
  }

  fail(message) {
    const text = `Failed: ${message}`;
    this.element.append(element("p", { className: "failure", role: "alert" }, text));
  }

  get message() {
    const calls = this.#whole.map((call) => call.message);
    const message = { role: "assistant", content: this.#text.text || null };
    return calls.length ? { ...message, tool_calls: calls } : message;
  }

  get isEmpty() {
    return !this.#text.text && !this.#whole.length;
  }

  /** Calls that were not cut: half of one cannot be answered, nor sent back. */
  get #whole() {
    return this.#calls.filter((call) => call.isWhole);
  }

  #think(text) {
    if (!this.#thinking) {
      this.#thinking = element("div", { className: "text" });
      const summary = element("summary", {}, "Thinking");
      const details = element("details", { className: "thinking", open: true }, summary);
      details.append(this.#thinking);
      this.#text.element.before(details);
    }
    this.#thinking.append(text);
  }

  #call(part) {
    this.#calls[part.index] ??= this.#newCall();
    this.#calls[part.index].push(part);
  }

  #newCall() {
    const call = new Call();
    this.#stats.before(call.element);
    return call;
  }

  #summary() {
    const facts = [];
    if (this.finishReason === "length") facts.push("cut at max tokens");
    if (this.#firstMs) facts.push(`first token ${Math.round(this.#firstMs - this.#startedMs)} ms`);
    const numTokens = this.#usage?.completion_tokens;
    if (numTokens) {
      facts.push(`${numTokens} tokens`);
      const seconds = (this.#lastMs - this.#firstMs) / 1000;
      if (numTokens > 1 && seconds > 0) {
        facts.push(`${((numTokens - 1) / seconds).toFixed(1)} tokens/s`);
      }
      const numCached = this.#usage.prompt_tokens_details?.cached_tokens ?? 0;
      facts.push(`${numCached} of ${this.#usage.prompt_tokens} prompt tokens found in memory`);
    }
    return facts.join(" · ");
  }
}

/** A tool call: its name and its arguments as they come, then a field for the tool's result. */
class Call {
  #name = element("h4");
  #arguments = element("pre");
  id = "";
  name = "";
  arguments = "";

  constructor() {
    this.element = element("div", { className: "call" }, this.#name, this.#arguments);
  }

  push({ id, function: { name, arguments: more = "" } }) {
    this.id = id ?? this.id;
    this.name = name ?? this.name;
    this.arguments += more;
    this.#name.textContent = `Calls ${this.name}`;
    this.#arguments.textContent = this.arguments;
  }

  get isWhole() {
    try {
      JSON.parse(this.arguments);
      return true;
    } catch {
      return false;
    }
  }

  get message() {
    const { id, name } = this;
    return { id, type: "function", function: { name, arguments: this.arguments } };
  }

  askForResult(onResult) {
    const input = element("input", { type: "text", autocomplete: "off", value: "" });
    const form = element(
      "form",
      {},
      element("label", {}, `What ${this.name} gives back`, input),
      element("button", { type: "submit" }, "Give result"),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.remove();
      onResult(this, input.value);
    });
    this.element.append(form);
  }
}
