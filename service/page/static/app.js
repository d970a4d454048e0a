// Wires the page: models, keys, the chat, and the panel that asks once a second.

import { ApiError, getJson, useKey } from "./api.js";
import { Chat, OptionError } from "./chat.js";
import { byId, element } from "./dom.js";
import { drawGlyphs } from "./glyphs.js";
import { choose, connectTabs, fillExamples } from "./options.js";
import { Panel } from "./panel.js";
import { Texts } from "./texts.js";

const POLL_MS = 1000;
const RETRY_MS = 3000;
const SUGGESTIONS = [
  { text: "What does os.path.join do?" },
  { text: "Do I need a coat in Paris?", option: "tools", label: "calls a tool" },
  {
    text: "Ada is 36 years old and lives in London. Extract the person.",
    option: "schema",
    label: "answers in JSON",
  },
];

const panel = new Panel();
const openPanel = connectTabs();
const chat = new Chat(askForKey);
const texts = new Texts(askForKey);
const tasks = new Map();
let hasModels = false;
let isLocked = false;

function setPulse(state, text) {
  byId("pulse").dataset.state = state;
  byId("pulse-text").textContent = text;
}

function askForKey() {
  isLocked = true;
  setPulse("lost", "an API key is needed");
  byId("key-tab").hidden = false;
  openPanel("panel-key");
  byId("key-error").textContent = byId("key").value ? "This key is not accepted." : "";
  byId("key").focus();
}

async function loadModels() {
  const { data } = await getJson("v1/models");
  const chosen = byId("model").value;
  byId("model").replaceChildren(
    ...data.map(({ id }) => element("option", { value: id, selected: id === chosen }, id)),
  );
  for (const { id, task } of data) tasks.set(id, task);
  // A model that no replica was seen of says what it is for later.
  hasModels = data.every(({ task }) => task);
  showModel();
}

/** A chat, or the form of what else the chosen model is for. */
function showModel() {
  const model = byId("model").value;
  const task = tasks.get(model);
  const hasTexts = Texts.has(task);
  const view = hasTexts ? "texts" : "chat";
  if (hasTexts) texts.show(model, task);
  if (document.body.dataset.view === view) return;
  document.body.dataset.view = view;
  openPanel("");
  if (document.activeElement !== byId("model")) byId(hasTexts ? "text" : "prompt").focus();
}

function showSuggestions() {
  const items = SUGGESTIONS.map(({ text, option, label }) => {
    const button = element("button", { type: "button" }, text);
    if (label) button.append(" ", element("span", { className: "mark" }, label));
    button.addEventListener("click", () => {
      choose(option);
      say(text);
    });
    return element("li", {}, button);
  });
  byId("suggestions").replaceChildren(...items);
}

async function refresh() {
  try {
    if (!hasModels) await loadModels();
    const state = await getJson("page/live");
    const model = byId("model").value;
    const replicas = state.replicas.filter((one) => one.model === model);
    const writes = document.body.dataset.view === "chat";
    panel.show({ ...state, replicas }, writes ? "num_output_tokens" : "num_prompt_tokens");
    setPulse("live", "live");
    return POLL_MS;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) askForKey();
    else setPulse("lost", "no metrics now; trying again");
    return RETRY_MS;
  }
}

// A page that nobody sees asks nothing, nor does one that has no key.
async function poll() {
  const waitMs = document.hidden || isLocked ? POLL_MS : await refresh();
  setTimeout(poll, waitMs);
}

/** Sends a text, unless an answer is under way; what cannot be sent goes back to its field. */
async function say(text) {
  if (chat.isBusy || !text.trim()) return;
  const prompt = byId("prompt");
  prompt.value = "";
  prompt.focus();
  byId("send-error").textContent = "";
  try {
    await chat.say(text);
  } catch (error) {
    if (!(error instanceof OptionError)) throw error;
    prompt.value = text;
    byId("send-error").textContent = error.message;
  }
}

function connect() {
  byId("model").addEventListener("change", showModel);
  byId("send-form").addEventListener("submit", (event) => {
    event.preventDefault();
    say(byId("prompt").value);
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("send-form").requestSubmit();
  });
  byId("stop").addEventListener("click", () => chat.stop());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chat.isBusy) chat.stop();
  });
  byId("new-chat").addEventListener("click", () => {
    chat.clear();
    byId("prompt").focus();
  });
  byId("panel-key").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey(byId("key").value.trim());
    isLocked = false;
    openPanel("");
  });
}

drawGlyphs();
showSuggestions();
fillExamples();
connect();
poll();
