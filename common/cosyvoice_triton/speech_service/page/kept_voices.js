// What is known of the selected voice, and what can be done with it: exported, deleted, another one imported.

const $ = (id) => document.getElementById(id);

/** The selected voice and its rights, as the service lists them; null if none of the list is selected. */
export function showRights(voice) {
  const date = voice?.created_at && new Date(1000 * voice.created_at);
  const known = {
    Voice: voice?.id ?? "None of the service's is selected.",
    Added: date?.toLocaleDateString(undefined, { dateStyle: "medium" }),
    "By the API key": voice?.created_by,
    Consent: voice && (voice.consent ?? "none that this key may see"),
  };
  const terms = Object.entries(known).filter(([, text]) => text).map(([term, text]) => {
    const group = document.createElement("div");
    const [name, value] = [document.createElement("dt"), document.createElement("dd")];
    name.textContent = term;
    value.textContent = text;
    group.append(name, value);
    return group;
  });
  $("rights").replaceChildren(...terms);
  $("export").disabled = $("remove").disabled = !voice;
}

/** call: of the API. selected: the name of the selected voice. changed: called with the name to select, if any. */
export function setUpKept(call, selected, changed) {
  const say = (text, wrong = false) => {
    $("kept-state").textContent = text;
    $("kept-state").classList.toggle("wrong", wrong);
  };
  const path = (name) => `/v1/audio/voices/${encodeURIComponent(name)}`;

  async function save() {
    const name = selected();
    const file = await (await call(`${path(name)}/export`)).blob();
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(file), download: `${name}.zip` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000); // once the browser has begun to save it
    say(`Exported ${name}.`);
  }

  async function remove() {
    const name = selected();
    if (!window.confirm(`Delete the voice ${name} for good?`)) return;
    await call(path(name), { method: "DELETE" });
    await changed();
    say(`Deleted ${name}.`);
  }

  /** Asks for another name as long as the name is taken. */
  async function load(file, name = "") {
    const body = new FormData();
    body.append("file", file, file.name);
    if (name) body.append("name", name);
    try {
      const voice = await (await call("/v1/audio/voices/import", { method: "POST", body })).json();
      await changed(voice.id);
      say(`Imported ${voice.id}.`);
    } catch (error) {
      if (error.code !== "voice_exists") throw error;
      const other = window.prompt("There is a voice of this name. Import it as:", name)?.trim();
      if (!other) throw error;
      await load(file, other);
    }
  }

  const on = (id, event, act) => $(id).addEventListener(event, () => act().catch((error) => say(error.message, true)));
  on("export", "click", save);
  on("remove", "click", remove);
  on("import", "change", async () => {
    const [file] = $("import").files;
    if (file) await load(file).finally(() => { $("import").value = ""; }); // the same one can be chosen again
  });
}
