// The search inside a saved page. It replaces api.js there, and loads nothing.

import { element } from "./common.js";

const saved = JSON.parse(element("data").textContent);
const [begun] = saved.events;
const over = saved.events.at(-1);

export async function fetched() {
  return { asks: false, methods: [], searches: [{ ...begun, state: over.state }] };
}
export const request = fetched;
export const sent = fetched;
export const follow = async (id, onEvents) => onEvents(saved.events);
