// Requests to the service. Queries are medical and private: they are sent in bodies, never in an
// address. Addresses are relative, because a proxy may strip a prefix.

import { asObject } from "./dom.js";
import { t } from "./language.js";
import { Problem, problemFrom } from "./problems.js";

const BASE = ""; // of the index whose documents the page shows

let accessKey = ""; // in memory only, until the page is closed

export function useAccessKey(key) {
  accessKey = key;
}

async function request(path, options = {}) {
  try {
    const response = await fetch(`${BASE}${path}`, {
      cache: "no-store",
      credentials: "same-origin",
      referrerPolicy: "no-referrer",
      ...options,
      headers: {
        Accept: "application/json, application/problem+json",
        ...(accessKey ? { Authorization: `Bearer ${accessKey}` } : {}),
        ...options.headers,
      },
    });
    if (!response.ok) throw await problemFrom(response);
    return response;
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    throw new Problem(t("problem.offline"), { lines: [t("problem.offline.hint")], retry: true });
  }
}

async function json(path, options) {
  return asObject(await (await request(path, options)).json());
}

const posted = (body, signal) => ({
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify(body),
  signal,
});

export const readIndex = () => json("index");
export const reloadIndex = () => json("index/reload", { method: "POST" });
export const readAnswerServer = () => json("answer/server");
export const sendAnswer = (body, signal) => request("answer", posted(body, signal));
export const readDocument = (id) => json(`documents/${encodeURIComponent(id)}`);
export const sendSearch = (body, signal) => json("search", posted(body, signal));

// Returns whether the service publishes its documentation: a proxy in front of it need not.
export async function hasDocumentation() {
  const { ok } = await fetch("docs", { method: "HEAD", referrerPolicy: "no-referrer" });
  return ok;
}
