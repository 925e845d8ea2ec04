// The request that was played, as a program. The key is never part of it.

const KEY = "YOUR_API_KEY";
const PATH = "/v1/audio/speech";
const NUMBERS = new Set(["speed", "seed"]);

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const typed = (fields) => Object.fromEntries(
  Object.entries(fields).map(([name, value]) => [name, NUMBERS.has(name) ? Number(value) : value]),
);
/** A string of Python: JSON's escapes are Python's, except for halves of surrogate pairs, which the service refuses. */
const python = (value) => JSON.stringify(value);

function curl(fields, recording, origin, hasKey) {
  const lines = [`curl ${shell(origin + PATH)} -o speech.${fields.response_format}`];
  if (hasKey) lines.push(`-H 'Authorization: Bearer ${KEY}'`);
  if (recording) {
    Object.entries(fields).forEach(([name, value]) => lines.push(`--form-string ${shell(`${name}=${value}`)}`));
    lines.push("-F ref_audio=@recording.wav");
  } else {
    lines.push("-H 'Content-Type: application/json'", `-d ${shell(JSON.stringify(typed(fields)))}`);
  }
  return lines.join(" \\\n    ");
}

function openai(fields, recording, origin, hasKey) {
  const { input, voice, response_format: format, ...others } = typed(fields);
  const extra = Object.entries(others).map(([name, value]) => `${python(name)}: ${python(value)}`);
  if (recording) extra.unshift('"ref_audio": base64.b64encode(open("recording.wav", "rb").read()).decode()');
  return [
    ...(recording ? ["import base64", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${python(`${origin}/v1`)}, api_key=${python(hasKey ? KEY : "none")})`,
    "with client.audio.speech.with_streaming_response.create(",
    '    model="tts-1",',
    `    voice=${python(voice ?? "")},`,
    `    input=${python(input)},`,
    `    response_format=${python(format)},`,
    `    extra_body={${extra.join(", ")}},`,
    ") as answer:",
    `    answer.stream_to_file("speech.${format}")`,
  ].join("\n");
}

const WHOLE = ["const audio = await answer.blob();"];
/** Plays samples as they arrive. */
const PLAYED = `const context = new AudioContext(); // in the handler of a click
const reader = answer.body.getReader();
let rest = [];
let end = 0; // of what is scheduled, in seconds
for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
  const bytes = Uint8Array.of(...rest, ...piece.value);
  const samples = new Int16Array(bytes.buffer, 0, Math.floor(bytes.length / 2));
  rest = bytes.slice(samples.byteLength);
  if (!samples.length) continue;
  const buffer = context.createBuffer(1, samples.length, Number(answer.headers.get("x-sample-rate")));
  buffer.copyToChannel(Float32Array.from(samples, (sample) => sample / 32768), 0);
  const source = new AudioBufferSourceNode(context, { buffer });
  source.connect(context.destination);
  end = Math.max(end, context.currentTime + 0.1);
  source.start(end);
  end += buffer.duration;
}`.split("\n");

function javascript(fields, recording, origin, hasKey) {
  const key = hasKey ? [`Authorization: "Bearer ${KEY}"`] : [];
  const streamed = fields.response_format === "wav";
  const json = JSON.stringify(typed({ ...fields, ...(streamed && { response_format: "pcm" }) }), null, 2);
  const lines = recording
    ? [
      "const form = new FormData();",
      `for (const [name, value] of Object.entries(${json})) form.append(name, value);`,
      'form.append("ref_audio", recording, "recording.wav"); // a File or Blob of the recording',
    ] : [`const body = JSON.stringify(${json});`];
  const headers = [...key, ...(recording ? [] : ['"Content-Type": "application/json"'])];
  return [
    ...lines,
    `const answer = await fetch(${JSON.stringify(origin + PATH)}, {`,
    '  method: "POST",',
    ...(headers.length ? [`  headers: { ${headers.join(", ")} },`] : []),
    recording ? "  body: form," : "  body,",
    "});",
    "if (!answer.ok) throw new Error((await answer.json()).error.message);",
    ...(streamed ? PLAYED : WHOLE),
  ].join("\n");
}

const WRITERS = { curl, python: openai, javascript };

/** The program in one of the languages of WRITERS. hasKey: the service was called with a key. */
export const codeOf = (language, fields, recording, origin, hasKey) => WRITERS[language](fields, recording, origin, hasKey);
