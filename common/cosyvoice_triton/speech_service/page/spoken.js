// The words that are spoken, each marked while it sounds.

const word = /[\p{L}\p{N}]/u;

/** A segment whose words share its expected seconds by their lengths: until the service has heard it itself. */
function guessed(text, start, seconds) {
  const pieces = [...new Intl.Segmenter().segment(text)].length || 1;
  const words = [];
  let at = 0;
  for (const { segment } of new Intl.Segmenter(undefined, { granularity: "word" }).segment(text)) {
    const begin = start + (seconds * at) / pieces;
    at += [...segment].length;
    if (word.test(segment)) words.push({ word: segment, start: begin, end: start + (seconds * at) / pieces });
  }
  return { text, words, end: start + seconds };
}

export class Spoken {
  #segments = []; // of the API, with the times of their words
  #expected = []; // [text, seconds] of all segments; the text of a pause is ""
  #words = []; // { span, start, end } of what is shown, in order
  #now = -1;

  constructor(place) { this.place = place; }

  clear() {
    this.#segments = [];
    this.#expected = [];
    this.#render();
  }

  add(segments) {
    this.#segments.push(...segments);
    this.#render();
  }

  expect(segments, seconds) {
    this.#expected = segments.map((text, index) => [text, seconds[index]]);
    this.#render();
  }

  #render() {
    this.place.replaceChildren();
    this.#words = [];
    this.#now = -1;
    this.#segments.forEach((segment) => this.#show(segment));
    let known = this.#segments.length;
    let end = this.#segments.at(-1)?.end ?? 0;
    for (const [text, seconds] of this.#expected) {
      if (known > 0) { // it has been heard, or is a pause before one that has
        if (text) known -= 1;
        continue;
      }
      const guess = guessed(text, end, seconds);
      if (text) this.#show(guess);
      ({ end } = guess);
    }
  }

  #show({ text, words }) {
    let at = 0;
    if (this.#words.length) this.place.append(" ");
    for (const { word: spoken, start, end } of words) {
      const found = text.indexOf(spoken, at);
      const span = document.createElement("span");
      span.textContent = spoken;
      this.place.append(text.slice(at, found), span);
      this.#words.push({ span, start, end });
      at = found + spoken.length;
    }
    this.place.append(text.slice(at)); // what is between two words belongs to none
  }

  /** Marks the word at so many seconds; none after the last one. */
  show(seconds) {
    let now = this.#words.findLastIndex(({ start }) => start <= seconds);
    if (now >= 0 && now === this.#words.length - 1 && seconds > this.#words[now].end) now = -1;
    if (now === this.#now) return;
    this.#words[this.#now]?.span.classList.remove("now");
    this.#now = now;
    const span = this.#words[now]?.span;
    span?.classList.add("now");
    if (span && this.place.scrollHeight > this.place.clientHeight) {
      this.place.scrollTop = span.offsetTop - this.place.clientHeight / 2;
    }
  }
}
