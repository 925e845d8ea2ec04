// The API's documentation, from the OpenAPI document of the service.

const $ = (id) => document.getElementById(id);

function made(kind, text = "", ...children) {
  const element = document.createElement(kind);
  element.append(text, ...children);
  return element;
}

/** `text` with what is between backticks as code. */
function prose(kind, text) {
  const element = document.createElement(kind);
  text.split("`").forEach((part, index) => element.append(index % 2 ? made("code", part) : part));
  return element;
}

/** A list of names with facts and a description each. */
function described(entries) {
  const list = document.createElement("dl");
  for (const [name, facts, text] of entries) {
    list.append(made("dt", "", made("code", name), made("span", facts)), prose("dd", text));
  }
  return list;
}

class Schemas {
  constructor(known) { this.known = known; }

  /** The schema itself in the place of a reference. */
  resolved(schema) { return schema.$ref ? this.known[schema.$ref.split("/").at(-1)] : schema; }

  typeOf(schema) {
    if (schema.const !== undefined) return JSON.stringify(schema.const);
    if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
    const choices = schema.anyOf ?? schema.oneOf;
    if (schema.allOf) return `the fields of ${this.typeOf(schema.allOf[0])}, see above, and`;
    if (choices) return choices.filter((each) => each.type !== "null").map((each) => this.typeOf(each)).join(" or ");
    if (schema.$ref) return schema.$ref.split("/").at(-1);
    if (schema.type === "array") return `list of ${this.typeOf(schema.items ?? {})}`;
    if (schema.format === "binary") return "file";
    if (schema.type === "object" && schema.additionalProperties?.type) return "object of texts";
    return { string: "text", integer: "whole number", number: "number", boolean: "true or false" }[schema.type] ?? "object";
  }

  /** A list of an object's fields. */
  fields(given) {
    const schema = this.resolved(given);
    return described(Object.entries(schema.properties ?? {}).map(([name, field]) => {
      const facts = [this.typeOf(field)];
      if (schema.required?.includes(name)) facts.push("required");
      if (["string", "number", "boolean"].includes(typeof field.default) && field.default !== "") facts.push(`default ${JSON.stringify(field.default)}`);
      return [name, ` ${facts.join(", ")}`, field.description ?? ""];
    }));
  }

  /** What a body or an answer may consist of; media types with the same schema together. */
  content(content) {
    const kinds = new Map();
    for (const [kind, { schema }] of Object.entries(content)) {
      const of = JSON.stringify(schema);
      kinds.set(of, { schema, kinds: [...(kinds.get(of)?.kinds ?? []), kind] });
    }
    return [...kinds.values()].flatMap(({ schema, kinds: names }) => {
      const head = made("p", "", ...names.flatMap((name) => [made("code", name), " "]));
      if (schema.description) head.append(prose("span", schema.description));
      else if (schema.allOf || !this.resolved(schema).properties) head.append(this.typeOf(schema));
      return this.resolved(schema).properties ? [head, this.fields(schema)] : [head];
    });
  }
}

function shown(path, method, operation, schemas) {
  const entry = document.createElement("details");
  entry.className = "card";
  entry.id = operation.operationId;
  const name = operation.responses[101] ? "WS" : method.toUpperCase();
  entry.append(made("summary", "", made("strong", name), " ", made("code", path), " ", prose("span", operation.summary)));
  if (operation.description) entry.append(made("pre", operation.description));
  if (operation.parameters.length) {
    const given = operation.parameters.map((each) => [each.name, ` in the ${each.in}`, each.description ?? ""]);
    entry.append(made("h3", "Parameters"), described(given));
  }
  if (operation.requestBody) entry.append(made("h3", "Body"), ...schemas.content(operation.requestBody.content));
  const answers = Object.entries(operation.responses);
  const [[code, success]] = answers.filter(([status]) => status < 400).concat(answers);
  entry.append(made("h3", `Answer ${code}`), ...schemas.content(success.content));
  const headers = Object.entries(success.headers ?? {});
  if (headers.length) entry.append(made("h3", "Headers"), described(headers.map(([name, { schema }]) => [name, "", schema.description])));
  const errors = answers.filter(([status]) => status !== code);
  entry.append(made("h3", "Errors"), described(errors.map(([status, { description }]) => [status, "", description])));
  if (!operation.security.length) entry.append(made("p", "No API key is needed."));
  return entry;
}

function find() {
  const wanted = $("filter").value.trim().toLowerCase();
  let found = 0;
  for (const section of $("operations").children) {
    const entries = [...section.querySelectorAll("details")];
    entries.forEach((entry) => { entry.hidden = !entry.textContent.toLowerCase().includes(wanted); });
    const here = entries.filter((entry) => !entry.hidden).length;
    section.hidden = !here;
    found += here;
  }
  $("found").textContent = `${found} ${found === 1 ? "route" : "routes"}`;
}

async function show() {
  const { info, paths, components } = await (await fetch("/openapi.json")).json();
  const schemas = new Schemas(components.schemas);
  $("about").replaceWith(Object.assign(prose("p", info.description), { id: "about" }));
  const sections = new Map();
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const [tag] = operation.tags;
      if (!sections.has(tag)) sections.set(tag, made("section", "", made("h2", tag)));
      sections.get(tag).append(shown(path, method, operation, schemas));
    }
  }
  $("operations").replaceChildren(...sections.values());
  find();
  const linked = document.getElementById(location.hash.slice(1));
  if (linked?.matches("details")) {
    linked.open = true;
    linked.scrollIntoView();
  }
}

$("example").textContent = `curl ${location.origin}/v1/audio/speech -o hello.mp3 \\
    -H 'Content-Type: application/json' -d '{"input": "Hello."}'
# with a key: -H 'Authorization: Bearer YOUR_API_KEY'`;
$("filter").addEventListener("input", find);
show().catch(() => { $("found").textContent = "The service does not answer. Load the page again."; });
