// Calls of the service's public API, and its errors in a visitor's words.

const LABELS = {
  input: "Text", voice: "Voice", instructions: "How to speak", ref_audio: "Your recording", ref_text: "Transcript",
  pronunciation: "Pronunciation", speed: "Speed", language: "Language", seed: "Seed", response_format: "Format",
  name: "Name", audio_sample: "Your recording", audio: "Your speech", consent: "Consent",
};
const KNOWN = {
  nothing_to_speak: "There is nothing to speak in this text, only signs. Write at least one word.",
  string_above_max_length: "This is too long. Shorten it, or speak it in parts.",
  too_many_streams: "The server has no place for another listener right now.",
  overloaded: "The server has no place for another listener right now.",
  voice_exists: "There is a voice of this name already. Choose another name, or delete that voice first.",
  not_your_voice: "Only the API key that added this voice may export or delete it; others may ask whoever runs the service.",
};
const OF_STATUS = {
  401: "This service asks for a key. Enter yours under “API key” and try again.",
  403: "This service may not be used from this address. Whoever runs it can allow it.",
  413: "This is too large. Choose a shorter recording or text.",
  429: "The server has no place for another listener right now.",
  502: "The model failed. Try again.",
  503: "The model is not ready: it is starting, or being replaced.",
  504: "The answer took too long. Try a shorter text.",
  507: "The voice cannot be kept: the service has no space for it. Whoever runs it can help.",
};

/** The service's message, with the page's name of the field that it is about. */
function labelled({ param, message }) {
  const label = LABELS[param];
  if (!label || !message) return message;
  const text = message.replace(new RegExp(`^(${param}[:,] )+`), "");
  return text.startsWith(`${param} `) ? label + text.slice(param.length) : `${label}: ${text}`;
}

export class Unreachable extends Error {}

/** An answer that is no success, with what to do. */
export class Refused extends Error {
  constructor(status, error = {}, after = null, id = null) {
    let text = KNOWN[error.code] ?? OF_STATUS[status] ?? labelled(error) ?? `The service answered ${status}.`;
    if (after) text += ` Try again in ${after} ${after === "1" ? "second" : "seconds"}.`;
    if (status >= 500 && error.message) text += ` (${error.message}${id ? `; request ${id}` : ""})`;
    super(text);
    this.status = status;
    this.code = error.code;
  }
}

/** fetch with the visitor's key. Unreachable or Refused. */
export async function call(path, key, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...options, headers }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The service does not answer.");
  });
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, error, answer.headers.get("retry-after"), answer.headers.get("x-request-id"));
}

/** The fields of a request as a form. A recording is sent as the file `name`. */
export function formOf(fields, recording = null, name = "ref_audio") {
  const form = new FormData();
  Object.entries(fields).forEach(([name, value]) => form.append(name, value));
  if (recording) form.append(name, recording, "recording.wav");
  return form;
}

/** A blob in base64, as the service reads it in a field. */
export const dataUrlOf = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

/** Yields the objects of server-sent events. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
    const whole = (rest + piece.value).split("\n\n");
    rest = whole.pop();
    for (const event of whole) yield JSON.parse(event.slice(event.indexOf("data: ") + 6));
  }
}

export const bytesOf = (base64) => Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
