// The conversation: sends it, streams the answer in, goes on with results of tools.

import { ApiError, streamJson } from "./api.js";
import { byId, element } from "./dom.js";
import { AssistantTurn, toolTurn, userTurn } from "./message.js";
import { OptionError, requestOptions, systemMessages } from "./options.js";

// A screen reader is told whole phrases, not tokens.
const PHRASE_END = /[.!?:;\n]\s*$/;
const LONG_PHRASE = 160;

export class Chat {
  #messages = [];
  #stopping = null;
  #phrase = "";
  #onUnauthorized;

  /** onUnauthorized: called where the server wants another key. */
  constructor(onUnauthorized) {
    this.#onUnauthorized = onUnauthorized;
  }

  get isBusy() {
    return this.#stopping !== null;
  }

  clear() {
    this.stop();
    this.#messages = [];
    byId("messages").replaceChildren();
    byId("welcome").hidden = false;
  }

  stop() {
    this.#stopping?.abort();
  }

  /** Raises OptionError, with nothing sent. */
  async say(text) {
    const options = requestOptions();
    this.#show(userTurn(text));
    this.#messages.push({ role: "user", content: text });
    await this.#answer(options);
  }

  async #giveResult(call, text) {
    this.#show(toolTurn(call.name, text));
    this.#messages.push({ role: "tool", tool_call_id: call.id, content: text });
    const called = this.#messages.findLast((message) => message.tool_calls);
    const given = this.#messages.filter((message) => message.role === "tool");
    const isGiven = ({ id }) => given.some((message) => message.tool_call_id === id);
    if (!called.tool_calls.every(isGiven)) return;
    // With the result the model may answer, whatever it had to do before.
    const options = requestOptions();
    if (options.tool_choice === "required") options.tool_choice = "auto";
    await this.#answer(options);
  }

  async #answer(options) {
    const turn = new AssistantTurn(byId("model").value);
    this.#show(turn.element);
    this.#setBusy(new AbortController());
    // A conversation that is cleared meanwhile does not get this turn.
    const messages = this.#messages;
    try {
      await this.#stream(turn, options);
    } catch (error) {
      this.#explain(turn, error);
    } finally {
      this.#announce("", true);
      this.#setBusy(null);
    }
    if (!turn.isEmpty) messages.push(turn.message);
    turn.end((call, text) => this.#giveResult(call, text));
    this.#follow();
  }

  async #stream(turn, options) {
    const body = {
      model: byId("model").value,
      messages: [...systemMessages(), ...this.#messages],
      stream: true,
      stream_options: { include_usage: true },
      ...options,
    };
    for await (const chunk of streamJson("v1/chat/completions", body, this.#stopping.signal)) {
      this.#announce(turn.push(chunk));
      this.#follow();
    }
  }

  #explain(turn, error) {
    if (error.name === "AbortError") {
      turn.finishReason = "stopped";
      return;
    }
    if (!(error instanceof ApiError)) throw error;
    turn.fail(error.message);
    if (error.status === 401) this.#onUnauthorized();
  }

  #show(turn) {
    byId("welcome").hidden = true;
    byId("messages").append(turn);
    turn.scrollIntoView({ block: "end" });
  }

  /** Keep the end in view for whoever is there; a reader who scrolled up is left alone. */
  #follow() {
    const scroll = byId("scroll");
    const left = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight;
    if (left < 120) scroll.scrollTop = scroll.scrollHeight;
  }

  #setBusy(stopping) {
    this.#stopping = stopping;
    const isBusy = stopping !== null;
    const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    byId("messages").setAttribute("aria-busy", String(isBusy));
    if (hadFocus) byId("prompt").focus();
  }

  #announce(text, isLast = false) {
    this.#phrase += text;
    const isWhole = PHRASE_END.test(this.#phrase) || this.#phrase.length > LONG_PHRASE;
    if (!this.#phrase.trim() || !(isWhole || isLast)) return;
    byId("announcer").append(element("p", {}, this.#phrase));
    this.#phrase = "";
    if (isLast) setTimeout(() => byId("announcer").replaceChildren(), 3000);
  }
}

export { OptionError };
