// Models that write no answer: a text becomes a vector, texts are scored, and what came of it.

import { ApiError, postJson } from "./api.js";
import { byId, element, svg } from "./dom.js";

const MAX_BARS = 128;

const lines = (text) => text.split("\n").filter((line) => line.trim());

/** What a model is for: the words around its form, and what the form asks the server.
 *
 * ask(model, text, others) gives nodes to show. others: what its second field is called, "" for
 * none; without a button there is no form.
 */
const TASKS = {
  embed: {
    title: "Make vectors of texts.",
    lead: "This model writes no answers. It reads a text and makes a vector of it: the nearer two vectors, the more alike their texts.",
    text: "Text",
    others: "Texts to compare it with, one a line",
    button: "Embed",
    ask: embed,
  },
  score: {
    title: "Find the text that answers a question.",
    lead: "This model writes no answers. It reads a question together with a text and scores how well they go together.",
    text: "Question",
    others: "Texts to score, one a line",
    button: "Score",
    ask: score,
  },
  classify: {
    title: "Tell what kind of text it is.",
    lead: "This model writes no answers. It gives a text a score for each of its labels.",
    text: "Text",
    others: "",
    button: "Classify",
    ask: classify,
  },
  transcribe: {
    title: "This model writes down what is said.",
    lead: "It has no chat: send it an audio file at /v1/audio/transcriptions.",
    text: "",
    others: "",
    button: "",
  },
};

async function embed(model, text, others) {
  const input = [text, ...others];
  const { data } = await postJson("v1/embeddings", { model, input });
  const [own, ...rest] = data.map((one) => one.embedding);
  const shown = [...drawVector(own)];
  if (rest.length) {
    const rows = rest.map((vector, i) => ({ text: others[i], score: cosine(own, vector) }));
    rows.sort((a, b) => b.score - a.score);
    shown.push(element("p", {}, "Cosine of the angle to it, nearest first"), ranking(rows));
  }
  return shown;
}

async function score(model, query, documents) {
  const { results } = await postJson("v1/rerank", { model, query, documents });
  const rows = results.map((one) => ({ text: one.document.text, score: one.relevance_score }));
  return [element("p", {}, "Scores, best first"), ranking(rows)];
}

async function classify(model, input) {
  const { data } = await postJson("pooling", { model, input, task: "classify" });
  const rows = data[0].data.map((one, i) => ({ text: `label ${i}`, score: one }));
  rows.sort((a, b) => b.score - a.score);
  return [element("p", {}, "Scores, best first"), ranking(rows)];
}

function cosine(one, other) {
  const dot = (a, b) => a.reduce((total, value, i) => total + value * b[i], 0);
  return dot(one, other) / Math.sqrt(dot(one, one) * dot(other, other));
}

/** Its first values as bars around a middle line. */
function drawVector(vector) {
  const some = vector.slice(0, MAX_BARS);
  const largest = Math.max(...some.map(Math.abs)) || 1;
  const label = `A vector of ${vector.length} values`;
  const drawn = svg("svg", {
    viewBox: `0 -1 ${some.length} 2`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": label,
  });
  some.forEach((value, x) => {
    const height = Math.abs(value) / largest;
    drawn.append(svg("rect", { x: x + 0.1, y: value > 0 ? -height : 0, width: 0.8, height }));
  });
  const part = some.length < vector.length ? `, the first ${some.length} drawn` : "";
  return [element("p", {}, `${label}${part}`), drawn];
}

function ranking(rows) {
  const items = rows.map(({ text, score: number }) => {
    const fill = element("i");
    fill.style.width = `${100 * Math.min(1, Math.max(0, number))}%`;
    return element(
      "li",
      {},
      element("span", {}, text),
      element("span", { className: "bar" }, fill),
      element("b", {}, number.toFixed(3)),
    );
  });
  return element("ol", { className: "ranking" }, ...items);
}

/** The form of whatever the chosen model is for. */
export class Texts {
  #model = "";
  #task = TASKS.embed;
  #onUnauthorized;

  /** onUnauthorized: called where the server wants another key. */
  constructor(onUnauthorized) {
    this.#onUnauthorized = onUnauthorized;
    byId("texts-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
  }

  /** Whether models of a task are shown here. */
  static has(task) {
    return task in TASKS;
  }

  /** What is shown of a model stays until another one is. */
  show(model, task) {
    if (model === this.#model) return;
    this.#model = model;
    this.#task = TASKS[task];
    const { title, lead, text, others, button } = this.#task;
    byId("texts-title").textContent = title;
    byId("texts-lead").textContent = lead;
    byId("text-label").textContent = text;
    byId("others-label").textContent = others;
    byId("others-label").hidden = byId("others").hidden = !others;
    byId("others").required = task === "score";
    byId("texts-send").textContent = button;
    byId("texts-form").hidden = !button;
    byId("texts-error").textContent = "";
    byId("result").replaceChildren();
  }

  async #submit() {
    const others = this.#task.others ? lines(byId("others").value) : [];
    const button = byId("texts-send");
    byId("texts-error").textContent = "";
    button.disabled = true;
    try {
      const shown = await this.#task.ask(this.#model, byId("text").value, others);
      byId("result").replaceChildren(...shown);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      byId("texts-error").textContent = error.message;
      if (error.status === 401) this.#onUnauthorized();
    } finally {
      button.disabled = false;
    }
  }
}
