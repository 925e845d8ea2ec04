// The last answers: heard again, downloaded, used again.

const KEPT = 10;

/** One answer. fields, recording: of its request. seconds, blob, segments: what came. */
export class History {
  #answers = [];

  /** place: the list. onPlay, onReuse: called with an answer. */
  constructor(place, onPlay, onReuse) {
    this.place = place;
    this.onPlay = onPlay;
    this.onReuse = onReuse;
  }

  add(answer) {
    answer.url = URL.createObjectURL(answer.blob);
    answer.line = this.#line(answer);
    this.place.prepend(answer.line);
    if (this.#answers.push(answer) > KEPT) {
      const oldest = this.#answers.shift();
      oldest.line.remove();
      URL.revokeObjectURL(oldest.url);
    }
  }

  #line(answer) {
    const { input, voice, response_format: format, seed } = answer.fields;
    const short = [...input].length > 60 ? `${[...input].slice(0, 60).join("")}…` : input;
    const made = (kind, text, how) => Object.assign(document.createElement(kind), { textContent: text, ...how });
    const said = answer.recording ? "your recording" : voice || "default voice";
    const about = made("span", `${said} · ${answer.seconds.toFixed(1)} s · seed ${seed}`, { className: "hint" });
    const button = (text, act) => {
      const made_ = made("button", text, { type: "button", onclick: () => act(answer) });
      made_.setAttribute("aria-label", `${text}: ${short}`);
      return made_;
    };
    const link = made("a", `Download ${format.toUpperCase()}`, {
      className: "button", href: answer.url, download: `speech-${seed}.${format}`,
    });
    link.setAttribute("aria-label", `Download ${format.toUpperCase()}: ${short}`);
    const buttons = made("div", "", { className: "buttons" });
    buttons.append(button("Play", this.onPlay), link, button("Use again", this.onReuse));
    const line = document.createElement("li");
    line.append(made("p", short), about, buttons);
    return line;
  }
}
