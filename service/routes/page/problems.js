// Errors in the language of the page. The service's codes are stable; its messages are not shown.

import { asArray, asObject, asText, button, byId, element, isNumber } from "./dom.js";
import { hasWords, t } from "./language.js";

// The code whose words are shown for a status without a known code, such as a proxy's.
const BY_STATUS = {
  400: "invalid_json",
  401: "unauthorized",
  403: "forbidden",
  404: "not_found",
  405: "method_not_allowed",
  413: "body_too_long",
  415: "unsupported_media_type",
  422: "invalid_request",
  429: "rate_limited",
  502: "bad_gateway",
  503: "service_unavailable",
  504: "deadline_exceeded",
};

const errorBox = byId("error");

export class Problem extends Error {
  constructor(heading, { code = "", lines = [], limit = null, requestId = "", retry = false, needsKey = false } = {}) {
    super(heading);
    Object.assign(this, { heading, code, lines, limit, requestId, retry, needsKey });
  }
}

function headingFor(status, code) {
  if (hasWords(`error.${code}`)) return t(`error.${code}`);
  if (Object.hasOwn(BY_STATUS, status)) return t(`error.${BY_STATUS[status]}`);
  return t(status >= 500 ? "error.internal_error" : "problem.other");
}

// Returns a line about one field; "" if the heading says the same.
function lineFor(error, code) {
  const name = asText(error.field).split(".")[0];
  const field = hasWords(`problem.field.${name}`) ? t(`problem.field.${name}`) : name;
  if (isNumber(error.limit)) {
    return t("problem.limit", { field, limit: error.limit, unit: name === "query" });
  }
  if (error.code === code) return "";
  const known = hasWords(`error.${error.code}`);
  return t("problem.line", { field, text: t(known ? `error.${error.code}` : "problem.invalid") });
}

// Reads the error of a response, `application/problem+json` unless it is a proxy's.
export async function problemFrom(response) {
  let body = {};
  try {
    body = asObject(await response.json());
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
  }
  const { status } = response;
  const code = asText(body.code);
  const errors = asArray(body.errors).map(asObject);
  const lines = errors.map((error) => lineFor(error, code)).filter(Boolean);
  const wait = Number(response.headers.get("Retry-After"));
  if (wait > 0) lines.push(t("problem.wait", { wait }));
  if (!hasWords(`error.${code}`)) lines.push(t("problem.status", { status, code }));
  return new Problem(headingFor(status, code), {
    code,
    lines,
    limit: errors.map(({ limit }) => limit).find(isNumber) ?? null,
    requestId: asText(body.request_id) || response.headers.get("X-Request-ID") || "",
    retry: status === 429 || status >= 500,
    needsKey: status === 401,
  });
}

// Converts an exception to a problem.
export function problemOf(error) {
  if (error instanceof Problem) return error;
  if (error?.name === "TimeoutError") {
    return new Problem(t("problem.timeout"), { lines: [t("problem.timeout.hint")], retry: true });
  }
  return new Problem(t("problem.unreadable"), { retry: true });
}

// Returns what to show of a problem. `retry` is called by its button, `useKey` with the access key
// that is entered.
export function problemParts(problem, heading, retry, useKey) {
  const parts = [element(heading, "", problem.heading)];
  for (const line of problem.lines) parts.push(element("p", "", line));
  if (problem.requestId) {
    parts.push(element("p", "request-id", t("problem.request", { id: problem.requestId })));
  }
  if (problem.needsKey && useKey) parts.push(keyForm(useKey));
  if (problem.retry && retry) parts.push(button("retry", t("retry"), retry));
  return parts;
}

// Shows a problem above the results.
export function showProblem(...problem) {
  errorBox.hidden = false;
  errorBox.replaceChildren(...problemParts(...problem));
}

export function hideProblem() {
  errorBox.hidden = true;
  errorBox.replaceChildren();
}

function keyForm(useKey) {
  const box = element("form", "key-form");
  const label = element("label", "", t("key.label"));
  const field = element("input");
  field.type = "password";
  field.id = "access-key";
  field.autocomplete = "off";
  field.required = true;
  label.htmlFor = field.id;
  box.append(label, field, element("button", "retry", t("key.use")));
  box.addEventListener("submit", (event) => {
    event.preventDefault();
    useKey(field.value.trim());
  });
  return box;
}
