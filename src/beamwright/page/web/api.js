// Requests to the server: the API key, requests, and the stream of a search's events.

import { element } from "./common.js";

const KEY = "beamwright-key";

let asking = null; // the open question for the key; all requests that need the key wait for it

function askForKey(refused) {
  asking ??= new Promise((resolve) => {
    const form = element("key-form");
    form.hidden = false;
    if (refused) element("key-note").textContent = "The key was not accepted.";
    element("key").focus();
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, element("key").value.trim());
      element("key").value = "";
      form.hidden = true;
      asking = null;
      resolve();
    }, { once: true });
  });
  return asking;
}

// Returns the response, or throws the server's error message.
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status === 401) {
      if (sessionStorage.getItem(KEY) === key) await askForKey(key !== null);
      continue;
    }
    if (response.ok) return response;
    const failure = new Error(await reason(response));
    failure.status = response.status;
    throw failure;
  }
}

async function reason(response) {
  try {
    const said = await response.json();
    const found = said.error?.message ?? said.detail;
    if (typeof found === "string") return found;
  } catch { /* the body is not JSON */ }
  return `the server answered ${response.status}`;
}

export const fetched = async (path, options) => (await request(path, options)).json();
export const sent = (path, body) => fetched(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

// Calls onEvents with each batch of events, from the first event until the search is over or the
// signal is aborted. After a broken connection it continues with the next event.
export async function follow(id, onEvents, signal) {
  let number = 0;
  for (let tries = 0; !signal.aborted; tries++) {
    try {
      const response = await request(`/feed/searches/${encodeURIComponent(id)}?from=${number}`, { signal });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        tries = 0;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        const events = lines.filter(Boolean).map((line) => JSON.parse(line));
        if (!events.length) continue;
        number += events.length;
        onEvents(events);
        if (events.at(-1).event === "end") return;
      }
    } catch (error) {
      if (signal.aborted || error.status) throw error;
    }
    await pause(Math.min(10, 0.5 * 2 ** tries));
  }
}
