// One request for speech, played while it arrives.

import { bytesOf, events, formOf } from "/static/api.js";
import { LiveSpeech } from "/static/live.js";
import { Player } from "/static/player.js";
import { int16 } from "/static/recorder.js";
import { SampleReader, wavOf } from "/static/wav.js";

const LIVE_RATE = 24000; // of `pcm`

/** What was asked for and what came. fields: those of the API, for the answer as a file. recording: of the voice, and
 * source: speech to convert instead of a text; each a Blob or null, the source also a LiveSpeech. */
export class Answer {
  constructor(fields, recording, source = null) {
    Object.assign(this, { fields, recording, source, segments: [], warnings: [], player: null, blob: null, firstMs: 0, seconds: 0 });
  }
}

/**
 * Speaks `answer` and resolves when all of it has been played, or `signal` has ended it.
 *
 * Samples are played as they arrive. A browser cannot do that with pieces of a compressed file, which is played as a
 * whole. on: { first(answer), segments(segments), complete(answer) }.
 */
export async function speak(answer, call, context, signal, on) {
  const streamed = answer.fields.response_format === "wav";
  const fields = { ...answer.fields, stream_format: "sse" };
  if (!answer.source) fields.timestamps = "word";
  if (streamed) fields.response_format = "pcm";
  const started = performance.now();
  const text = { ...fields, no_words: "error" }; // a visitor is told, while a program's callers hear a silence
  const body = answer.source instanceof Blob ? formOf(fields, answer.source, "audio") : formOf(text, answer.recording);
  const path = answer.source ? "/v1/audio/voice-conversion" : "/v1/audio/speech";
  const live = answer.source instanceof LiveSpeech;
  const reply = live ? null : await call(path, { method: "POST", body, signal });
  const arriving = live ? answer.source.converted(answer.fields, context, signal) : events(reply.body);
  const reader = new SampleReader();
  const pieces = [];
  let done = null;
  for await (const event of arriving) {
    if (event.type === "speech.audio.delta") {
      const bytes = event.bytes ?? bytesOf(event.audio);
      if (!pieces.length) {
        answer.firstMs = performance.now() - started;
        if (streamed) answer.player = new Player(context, live ? LIVE_RATE : Number(reply.headers.get("x-sample-rate")));
        on.first(answer);
      }
      pieces.push(bytes);
      if (streamed) answer.player.add(reader.take(bytes));
    } else if (event.type === "speech.audio.timestamps") {
      answer.segments.push(...event.segments);
      on.segments(event.segments);
    } else if (event.type === "speech.audio.error") {
      throw new Error(event.error.message);
    } else {
      done = event;
    }
  }
  if (!done) throw new Error("the connection ended");
  answer.warnings = done.warnings ?? [];
  answer.took = (performance.now() - started) / 1000;
  if (streamed) {
    answer.blob = wavOf(answer.player.parts, answer.player.rate);
  } else {
    answer.blob = new Blob(pieces, { type: `audio/${answer.fields.response_format}` });
    const sound = await context.decodeAudioData(await answer.blob.arrayBuffer());
    answer.player = new Player(context, sound.sampleRate);
    answer.player.add(int16(sound.getChannelData(0)));
  }
  answer.player.complete = true;
  answer.seconds = answer.player.seconds;
  on.complete(answer);
  while (answer.player.sounding && !signal.aborted) await new Promise((wait) => setTimeout(wait, 50));
}
