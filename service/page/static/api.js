// The server this page came from: requests with the key that the user gave, and streams of events.

let key = "";

export function useKey(given) {
  key = given;
}

/** An answer that is an error. status 0: there was no answer. */
export class ApiError extends Error {
  constructor(message, status, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.", 0);
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const text = await response.text();
  try {
    const { message, param } = JSON.parse(text).error;
    return new ApiError(message, response.status, param);
  } catch {
    return new ApiError(`The server answered ${response.status}.`, response.status);
  }
}

export async function getJson(path) {
  return (await ask(path)).json();
}

const posted = (body) => ({
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify(body),
});

export async function postJson(path, body) {
  return (await ask(path, posted(body))).json();
}

/** POST a body and yield each event's object until the stream says it is done. */
export async function* streamJson(path, body, signal) {
  const response = await ask(path, { ...posted(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("The answer broke off.", 0);
    pending += value;
    const events = pending.split("\n\n");
    pending = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ApiError(parsed.error.message, response.status);
      yield parsed;
    }
  }
}
