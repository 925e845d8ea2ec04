// The list of voices: one is chosen, each can be heard.

const FEW = 8; // more of them can be searched

export class Voices {
  /** place: the list. search: a field with its label, hidden while there are few. onHear: called with a name. */
  constructor(place, search, onHear) {
    this.place = place;
    this.search = search;
    this.onHear = onHear;
    search.addEventListener("input", () => this.#find());
  }

  /** The name of the chosen voice. */
  get chosen() { return this.place.querySelector("input:checked")?.value ?? ""; }

  set chosen(name) {
    const inputs = [...this.place.querySelectorAll("input")];
    const found = inputs.find((input) => input.value === name) ?? inputs[0];
    if (!found) return;
    found.checked = true;
    found.dispatchEvent(new Event("change", { bubbles: true })); // as if it had been clicked
  }

  get names() { return [...this.place.querySelectorAll("input")].map((input) => input.value); }

  /** voices: [name, what it is called, whether it can be heard]. Selects `chosen`, if it is there. */
  show(voices, chosen) {
    this.place.replaceChildren(...voices.map(([name, label, heard]) => this.#row(name, label, heard)));
    this.chosen = chosen;
    const many = voices.length > FEW;
    this.search.hidden = this.search.labels[0].hidden = !many;
    if (!many) this.search.value = "";
    this.#find();
  }

  #row(name, label, heard) {
    const row = document.createElement("div");
    const text = document.createElement("label");
    const input = Object.assign(document.createElement("input"), { type: "radio", name: "voice", value: name });
    input.setAttribute("form", "speech");
    text.append(input, ` ${label}`);
    row.append(text);
    if (heard) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: "▶" });
      button.setAttribute("aria-label", `Hear ${label}`);
      button.addEventListener("click", () => this.onHear(name));
      row.append(button);
    }
    return row;
  }

  #find() {
    const wanted = this.search.value.trim().toLowerCase();
    for (const row of this.place.children) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  }
}
