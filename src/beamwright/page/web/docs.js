// A readable view of openapi.json: every route with its body and its parameters.

import { element, make } from "./common.js";
import { fetched } from "./api.js";

const KINDS = { string: "text", integer: "whole number", boolean: "true or false", object: "object", null: "null" };

function kind({ $ref, anyOf, enum: values, items, type, const: value }) {
  if ($ref) return $ref.split("/").at(-1);
  if (anyOf) return anyOf.map(kind).join(" or ");
  if (values) return values.map((each) => JSON.stringify(each)).join(", ");
  if (value !== undefined) return JSON.stringify(value);
  return items ? `list of (${kind(items)})` : KINDS[type] ?? type ?? "anything";
}

function row(name, schema, required) {
  return make("div", {}, make("dt", {}, required ? `${name} (required)` : name), make("dd", {}, kind(schema)));
}

function section(path, method, { description, summary, parameters = [], requestBody }) {
  const body = requestBody?.content["application/json"].schema;
  const rows = [
    ...parameters.map((each) => row(each.name, each.schema, each.required)),
    ...Object.entries(body?.properties ?? {}).map(([name, schema]) => row(name, schema, body.required?.includes(name))),
  ];
  const said = make("p", {}, description ?? summary ?? "");
  return make("section", {}, make("h2", {}, `${method.toUpperCase()} ${path}`), said, make("dl", { class: "fields" }, ...rows));
}

try {
  const { paths } = await fetched("/openapi.json");
  const sections = Object.entries(paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, route]) => section(path, method, route)));
  element("routes").replaceChildren(...sections);
} catch (error) {
  element("problem-note").hidden = false;
  element("problem-note").textContent = error.message;
}
