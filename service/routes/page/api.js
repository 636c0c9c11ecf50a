// Requests to the service. Queries are medical and private: they are sent in bodies, never in an
// address. Addresses are relative, because a proxy may strip a prefix.

import { asObject } from "./dom.js";
import { t } from "./language.js";
import { Problem, problemFrom } from "./problems.js";

let index = ""; // the index that the page searches, "" for the default one
let accessKey = ""; // in memory only, until the page is closed

export function useAccessKey(key) {
  accessKey = key;
}

export function useIndex(name) {
  index = name;
}

// Returns the address of what is asked of the index, given that for the default one.
function ofIndex(path) {
  if (!index) return path;
  const rest = path.replace(/^index\/?/, "");
  return `indexes/${encodeURIComponent(index)}${rest ? "/" : ""}${rest}`;
}

async function request(path, options = {}) {
  try {
    const response = await fetch(path, {
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

export const readIndex = () => json(ofIndex("index"));
export const readIndexes = () => json("indexes");
export const readVersions = () => json(ofIndex("index/versions"));
export const readDocuments = (limit, after) =>
  json(ofIndex(`documents?${new URLSearchParams({ limit, ...(after === null ? {} : { after }) })}`));
export const reloadIndex = () => json(ofIndex("index/reload"), { method: "POST" });
export const readAnswerServer = () => json("answer/server");
export const sendAnswer = (body, signal) => request(ofIndex("answer"), posted(body, signal));
export const readDocument = (id) => json(ofIndex(`documents/${encodeURIComponent(id)}`));
export const sendSearch = (body, signal) => json(ofIndex("search"), posted(body, signal));

// Returns whether the service publishes its documentation: a proxy in front of it need not.
export async function hasDocumentation() {
  const { ok } = await fetch("docs", { method: "HEAD", referrerPolicy: "no-referrer" });
  return ok;
}
