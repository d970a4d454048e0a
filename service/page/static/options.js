// The options around a message: their fields, what is in them by default, and what they ask for.

import { byId } from "./dom.js";

const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Tells the weather of a city.",
      parameters: {
        type: "object",
        properties: { city: { type: "string", maxLength: 40 } },
        required: ["city"],
        additionalProperties: false,
      },
    },
  },
];
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 40 },
    age: { type: "integer", minimum: 0, maximum: 150 },
    city: { type: "string", maxLength: 40 },
  },
  required: ["name", "age", "city"],
  additionalProperties: false,
};
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed", "repetition_penalty"];
const NUM_ALTERNATIVES = 5;

/** A field that cannot be used as it is; the text is already shown beside it. */
export class OptionError extends Error {}

export function fillExamples() {
  byId("tools").value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
  byId("schema").value = JSON.stringify(EXAMPLE_SCHEMA, null, 2);
  byId("tool_choice").addEventListener("change", markWhatIsOn);
  byId("use_schema").addEventListener("change", markWhatIsOn);
}

/** Tools that the model may call, an answer in the schema, or neither. */
export function choose(option) {
  byId("tool_choice").value = option === "tools" ? "auto" : "";
  byId("use_schema").checked = option === "schema";
  markWhatIsOn();
}

function markWhatIsOn() {
  byId("tools-mark").hidden = !byId("tool_choice").value;
  byId("schema-mark").hidden = !byId("use_schema").checked;
}

/** Each button opens its panel and closes the others. */
export function connectTabs() {
  const tabs = [...document.querySelectorAll(".tabs button")];
  const open = (chosen) => {
    for (const tab of tabs) {
      const isOpen = tab === chosen;
      tab.setAttribute("aria-expanded", String(isOpen));
      byId(tab.getAttribute("aria-controls")).hidden = !isOpen;
    }
  };
  for (const tab of tabs) {
    tab.addEventListener("click", () => {
      open(tab.getAttribute("aria-expanded") === "true" ? null : tab);
    });
  }
  return (id) => open(tabs.find((tab) => tab.getAttribute("aria-controls") === id));
}

/** Fields of a request as the options have it. Raises OptionError. */
export function requestOptions() {
  const asked = {};
  for (const name of NUMBERS) {
    const field = byId(name);
    if (!field.checkValidity()) {
      throw new OptionError(`${name}: ${field.validationMessage}`);
    }
    if (field.value !== "") asked[name] = field.valueAsNumber;
  }
  if (byId("logprobs").checked) {
    asked.logprobs = true;
    asked.top_logprobs = NUM_ALTERNATIVES;
  }
  const choice = byId("tool_choice").value;
  if (choice) {
    asked.tools = jsonOf("tools", "tools-error");
    asked.tool_choice = choice;
    asked.parallel_tool_calls = byId("parallel").checked;
  }
  if (byId("use_schema").checked) {
    const schema = jsonOf("schema", "schema-error");
    asked.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return asked;
}

export function systemMessages() {
  const text = byId("system").value.trim();
  return text ? [{ role: "system", content: text }] : [];
}

function jsonOf(id, errorId) {
  const field = byId(id);
  try {
    const value = JSON.parse(field.value);
    field.removeAttribute("aria-invalid");
    byId(errorId).textContent = "";
    return value;
  } catch (error) {
    field.setAttribute("aria-invalid", "true");
    byId(errorId).textContent = `This is no JSON: ${error.message}`;
    throw new OptionError(`${id}: this is no JSON`);
  }
}
