// The API's own description, /openapi.json, as a page.

import { make } from "./view.js";

const api = await (await fetch("/openapi.json")).json();

document.getElementById("about").textContent = `${api.info.summary} Version ${api.info.version}.`;
for (const [path, methods] of Object.entries(api.paths)) {
  for (const [method, operation] of Object.entries(methods)) {
    document.getElementById("endpoints").append(endpoint(path, method, operation));
  }
}
for (const [name, schema] of Object.entries(api.components.schemas)) {
  if (schema.properties) document.getElementById("shapes").append(...shape(name, schema));
}

function code(text) {
  return make("code", { textContent: text });
}

// Text whose `names` stand between backticks.
function prose(tag, text) {
  return make(tag, {}, ...text.split("`").map((part, index) => (index % 2 ? code(part) : part)));
}

function endpoint(path, method, operation) {
  const verb = make("code", { textContent: method.toUpperCase(), className: "method" });
  const summary = make("span", { textContent: operation.summary, className: "summary" });
  const part = make("section", {}, make("h2", {}, verb, code(path), summary));
  if (operation.requestBody) part.append(prose("p", operation.requestBody.description));
  part.append(make("pre", { textContent: example(path, operation), tabIndex: 0 }));
  const rows = [...(operation.parameters ?? []).map(parameterRow), ...Object.entries(operation.responses).map(answerRow)];
  part.append(make("table", {}, ...rows));
  return part;
}

function example(path, operation) {
  const address = `${location.origin}${path}`;
  if (!operation.requestBody) return `curl ${address}`;
  return `curl -F image=@picture.png ${address}\ncurl --data-binary @picture.png '${address}?top_k=3'`;
}

function row(name, kind, text) {
  const cells = [make("td", { className: "kind", textContent: kind }), prose("td", text)];
  return make("tr", {}, make("th", { scope: "row" }, code(name)), ...cells);
}

function parameterRow({ name, schema, description }) {
  return row(`?${name}=`, `${schema.minimum} to ${schema.maximum}, else ${schema.default}`, description);
}

function answerRow([status, { description, content }]) {
  return row(status, nameOf(content?.["application/json"]?.schema), description);
}

function shape(name, schema) {
  const rows = Object.entries(schema.properties).map(([field, type]) => row(field, nameOf(type), type.description ?? ""));
  return [make("h3", { id: name }, code(name)), make("table", {}, ...rows)];
}

// Such as `list of Link` or `number or null`.
function nameOf(type) {
  if (!type) return "";
  if (type.$ref) return type.$ref.split("/").at(-1);
  if (type.anyOf) return type.anyOf.map(nameOf).join(" or ");
  if (type.const) return `"${type.const}"`;
  if (type.prefixItems) return `${type.prefixItems.length} × ${nameOf(type.prefixItems[0])}`;
  if (type.type === "array") return `list of ${nameOf(type.items)}`;
  return type.type ?? "";
}
