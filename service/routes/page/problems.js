// Errors in Chinese. The service's codes are stable; its messages are English and are not shown.

import { asObject, asText, byId, element, isNumber } from "./dom.js";

// What is wrong, and what the reader can do, by the code of the error.
const BY_CODE = {
  invalid_json: "请求的格式不正确，请刷新页面后再试。",
  invalid_request: "这次检索的内容不符合要求，请修改后再试。",
  unauthorized: "没有使用此服务的权限：缺少访问密钥，或密钥不正确。",
  forbidden: "没有使用此服务的权限：此密钥不能用于检索。",
  not_found: "没有找到所请求的接口，请检查访问地址。",
  method_not_allowed: "请求的方式不正确，请刷新页面后再试。",
  body_too_long: "输入的内容太长，请缩短后再试。",
  unsupported_media_type: "请求的格式不正确，请刷新页面后再试。",
  empty_text: "请输入想查询的问题。",
  text_too_long: "问题太长，请缩短后再试。",
  top_k_too_large: "要求的结果条数太多。",
  filter_too_large: "筛选条件太多，请减少后再试。",
  unknown_filter_field: "索引已更新，其中没有所选的筛选条件，请清除后再试。",
  mode_not_available: "索引已更新，其中没有所选的查找方式，请刷新页面后再试。",
  rerank_not_available: "索引已更新，其中的结果不能重新排序，请取消后再试。",
  rerank_too_large: "要重新排序的结果太多，请取消后再试。",
  overloaded: "服务繁忙，请稍后再试。",
  rate_limited: "请求太频繁，请稍后再试。",
  too_many_requests: "服务繁忙，请稍后再试。",
  shutting_down: "服务正在停止，请稍后再试。",
  unavailable: "服务所依赖的数据库没有回应，请稍后再试。",
  deadline_exceeded: "服务处理超时，请稍后再试。",
  internal_error: "服务出现错误，请稍后再试。",
};

const BY_STATUS = {
  400: BY_CODE.invalid_json,
  401: BY_CODE.unauthorized,
  403: BY_CODE.forbidden,
  404: BY_CODE.not_found,
  405: BY_CODE.method_not_allowed,
  413: BY_CODE.body_too_long,
  415: BY_CODE.unsupported_media_type,
  422: BY_CODE.invalid_request,
  429: BY_CODE.rate_limited,
  502: "无法连接到服务，请稍后再试。",
  503: "服务暂时不可用，请稍后再试。",
  504: BY_CODE.deadline_exceeded,
};

const FIELDS = { query: "问题", filter: "筛选条件", top_k: "结果条数" };

const errorBox = byId("error");

export class Problem extends Error {
  constructor(heading, { lines = [], requestId = "", retry = false, needsKey = false } = {}) {
    super(heading);
    Object.assign(this, { heading, lines, requestId, retry, needsKey });
  }
}

function headingFor(status, code) {
  if (Object.hasOwn(BY_CODE, code)) return BY_CODE[code];
  if (Object.hasOwn(BY_STATUS, status)) return BY_STATUS[status];
  return status >= 500 ? BY_CODE.internal_error : "检索没有成功。";
}

// Returns a line about one field; "" if the heading says the same.
function lineFor(error, code) {
  const name = asText(error.field).split(".")[0];
  const field = Object.hasOwn(FIELDS, name) ? FIELDS[name] : name;
  if (isNumber(error.limit)) return `${field}：不能超过 ${error.limit}${name === "query" ? " 个字" : ""}。`;
  if (error.code === code) return "";
  return `${field}：${Object.hasOwn(BY_CODE, error.code) ? BY_CODE[error.code] : "内容不符合要求。"}`;
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
  const lines = (Array.isArray(body.errors) ? body.errors : [])
    .map((error) => lineFor(asObject(error), code))
    .filter(Boolean);
  const wait = Number(response.headers.get("Retry-After"));
  if (wait > 0) lines.push(`建议等待 ${wait} 秒后重试。`);
  if (!Object.hasOwn(BY_CODE, code)) lines.push(`状态码 ${status}${code ? `，错误代码 ${code}` : ""}`);
  return new Problem(headingFor(status, code), {
    lines,
    requestId: asText(body.request_id) || response.headers.get("X-Request-ID") || "",
    retry: status === 429 || status >= 500,
    needsKey: status === 401,
  });
}

// Converts an exception to a problem.
export function problemOf(error) {
  if (error instanceof Problem) return error;
  if (error?.name === "TimeoutError") {
    return new Problem("等待服务回应超时。", {
      lines: ["服务可能正忙，请稍后再试。"],
      retry: true,
    });
  }
  return new Problem("服务的回应无法识别，请稍后再试。", { retry: true });
}

// Returns what to show of a problem. `retry` is called by its button, `useKey` with the access key
// that is entered.
export function problemParts(problem, heading, retry, useKey) {
  const parts = [element(heading, "", problem.heading)];
  for (const line of problem.lines) parts.push(element("p", "", line));
  if (problem.requestId) {
    parts.push(element("p", "request-id", `请求编号：${problem.requestId}`));
  }
  if (problem.needsKey) parts.push(keyForm(useKey));
  if (problem.retry && retry) {
    const button = element("button", "retry", "重试");
    button.type = "button";
    button.addEventListener("click", retry);
    parts.push(button);
  }
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
  const label = element("label", "", "访问密钥");
  const field = element("input");
  field.type = "password";
  field.id = "access-key";
  field.autocomplete = "off";
  field.required = true;
  label.htmlFor = field.id;
  box.append(label, field, element("button", "retry", "使用此密钥"));
  box.addEventListener("submit", (event) => {
    event.preventDefault();
    useKey(field.value.trim());
  });
  return box;
}
