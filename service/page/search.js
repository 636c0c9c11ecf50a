// Search page. Queries are medical and private: they are sent in the body of
// POST /search and kept nowhere else (no URL, no storage, no console).
// All data reaches the document through textContent, never as markup.

const TOP_K = 10;
const TIMEOUT_MS = 30_000;
const LOADING_DELAY_MS = 150;
const SHORTEST_BAR = 0.2; // of the lowest score shown

const EXAMPLES = [
  "高血压患者饮食上要注意什么？",
  "孩子发烧到 39 度应该怎么处理？",
  "糖尿病早期有哪些症状？",
  "经常胃痛反酸是什么原因？",
  "晚上总是睡不着怎么调理？",
  "腰椎间盘突出需要手术吗？",
];

const STAGES = [
  ["queue", "排队"],
  ["encode", "编码"],
  ["search", "检索"],
  ["fetch", "取文"],
];

const byId = (id) => document.getElementById(id);

const form = byId("search-form");
const input = byId("query");
const departments = byId("departments");
const chips = byId("chips");
const clearButton = byId("clear-departments");
const examples = byId("examples");
const errorBox = byId("error");
const statusLine = byId("status");
const timingsBox = byId("timings");
const hitList = byId("hits");
const emptyHint = byId("empty-hint");
const indexInfo = byId("index-info");

const selected = new Set();
let current = null; // the search under way: { controller }
let asked = null; // the last query sent, for retry and for changed filters
let knownVersion = null;
let accessKey = ""; // kept until the page is left, nowhere else

/* ---------- small helpers ---------- */

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const asText = (value) =>
  typeof value === "string" ? value.trim() : isNumber(value) ? String(value) : "";
const asList = (value) => (Array.isArray(value) ? value : [value]).map(asText).filter(Boolean);
const asObject = (value) =>
  value !== null && typeof value === "object" && !Array.isArray(value) ? value : {};

function milliseconds(value) {
  if (value > 0 && value < 0.05) return "<0.1";
  return value < 100 ? value.toFixed(1) : String(Math.round(value));
}

/* ---------- errors ---------- */

class Problem extends Error {
  constructor(
    heading,
    { lines = [], items = [], requestId = "", retry = false, needsKey = false } = {},
  ) {
    super(heading);
    Object.assign(this, { heading, lines, items, requestId, retry, needsKey });
  }
}

function headingFor(status) {
  if (status === 400 || status === 422) return "这次检索的内容没有被接受，请修改后再试。";
  if (status === 401 || status === 403) return "没有使用此服务的权限。";
  if (status === 404) return "没有找到所需的索引或接口。";
  if (status === 413) return "输入的内容太长，请缩短后再试。";
  if (status === 429) return "请求太频繁，请稍等片刻再试。";
  if (status === 503) return "服务暂时不可用，请稍后再试。";
  if (status === 504) return "服务处理超时，请稍后再试。";
  if (status >= 500) return "服务出现错误，请稍后再试。";
  return "检索没有成功。";
}

async function problemFrom(response) {
  let body = {};
  try {
    body = asObject(await response.json());
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
  }
  const { status } = response;
  const lines = [asText(body.title), asText(body.detail)].filter(Boolean);
  if (lines.length === 0) lines.push(`状态码 ${status}`);
  const wait = Number(response.headers.get("Retry-After"));
  if (wait > 0) lines.push(`建议等待 ${wait} 秒后重试。`);
  const items = (Array.isArray(body.errors) ? body.errors : [])
    .map((entry) => [asText(entry?.field), asText(entry?.message)].filter(Boolean).join("："))
    .filter(Boolean);
  return new Problem(headingFor(status), {
    lines,
    items,
    requestId: asText(body.request_id) || response.headers.get("X-Request-ID") || "",
    retry: status === 429 || status >= 500,
    needsKey: status === 401,
  });
}

function problemOf(error) {
  if (error instanceof Problem) return error;
  if (error?.name === "TimeoutError") {
    return new Problem("等待服务回应超时。", {
      lines: ["服务可能正忙，请稍后再试。"],
      retry: true,
    });
  }
  return new Problem("服务的回应无法识别，请稍后再试。", { retry: true });
}

function showError(problem) {
  const parts = [element("h2", "", problem.heading)];
  for (const line of problem.lines) parts.push(element("p", "", line));
  if (problem.items.length > 0) {
    const list = element("ul");
    for (const item of problem.items) list.append(element("li", "", item));
    parts.push(list);
  }
  if (problem.requestId) {
    parts.push(element("p", "request-id", `请求编号：${problem.requestId}`));
  }
  if (problem.needsKey) parts.push(keyForm());
  if (problem.retry && asked !== null) {
    const button = element("button", "retry", "重试");
    button.type = "button";
    button.addEventListener("click", () => {
      statusLine.focus();
      search(asked);
    });
    parts.push(button);
  }
  errorBox.hidden = false;
  errorBox.replaceChildren(...parts);
}

function keyForm() {
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
    accessKey = field.value.trim();
    statusLine.focus();
    if (asked !== null) search(asked);
    else hideError();
    loadIndex();
  });
  return box;
}

function hideError() {
  errorBox.hidden = true;
  errorBox.replaceChildren();
}

/* ---------- requests ---------- */

async function requestJson(path, options = {}) {
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
    return asObject(await response.json());
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    throw new Problem("无法连接到服务。", {
      lines: ["请检查网络连接，或确认服务正在运行，然后再试。"],
      retry: true,
    });
  }
}

function searchBody(query) {
  const body = { query, top_k: TOP_K, include: ["text", "metadata"] };
  if (selected.size > 0) body.filter = { department: [...selected] };
  return JSON.stringify(body);
}

async function search(query) {
  current?.controller.abort();
  const run = { controller: new AbortController() };
  current = run;
  asked = query;

  examples.hidden = true;
  hideError();
  input.removeAttribute("aria-invalid");
  hitList.setAttribute("aria-busy", "true");
  const loadingTimer = setTimeout(() => setLoading(true), LOADING_DELAY_MS);
  const timeout = setTimeout(
    () => run.controller.abort(new DOMException("timeout", "TimeoutError")),
    TIMEOUT_MS,
  );

  const started = performance.now();
  try {
    const answer = await requestJson("search", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: searchBody(query),
      signal: run.controller.signal,
    });
    if (current !== run) return; // a newer search took over
    const roundTrip = performance.now() - started;
    if (!Array.isArray(answer.hits)) throw new SyntaxError("no hits");
    setLoading(false);
    showAnswer(answer, roundTrip);
  } catch (error) {
    if (current !== run) return;
    setLoading(false);
    clearResults();
    statusLine.textContent = "";
    showError(problemOf(error));
  } finally {
    clearTimeout(loadingTimer);
    clearTimeout(timeout);
    if (current === run) {
      current = null;
      setLoading(false);
      hitList.removeAttribute("aria-busy");
    }
  }
}

function setLoading(on) {
  document.body.classList.toggle("is-loading", on);
  if (on) {
    statusLine.textContent = "正在检索…";
    timingsBox.hidden = true;
    emptyHint.hidden = true;
    if (hitList.childElementCount === 0) {
      for (let i = 0; i < 3; i += 1) {
        const item = element("li", "skeleton");
        item.setAttribute("aria-hidden", "true");
        hitList.append(item);
      }
    }
  } else {
    for (const item of hitList.querySelectorAll(".skeleton")) item.remove();
  }
}

/* ---------- results ---------- */

function clearResults() {
  for (const text of hitList.querySelectorAll(".text")) resized.unobserve(text);
  hitList.replaceChildren();
  timingsBox.hidden = true;
  timingsBox.replaceChildren();
  emptyHint.hidden = true;
}

function showAnswer(answer, roundTrip) {
  clearResults();
  const timings = asObject(answer.timings_ms);
  const hits = answer.hits.map(asObject);
  const spent = milliseconds(isNumber(timings.total) ? timings.total : roundTrip);
  const tail = `用时 ${spent} 毫秒${answer.cached === true ? "（来自缓存）" : ""}`;

  if (hits.length === 0) {
    statusLine.textContent = `没有符合条件的结果，${tail}`;
    emptyHint.textContent =
      selected.size > 0 ? "可以减少所选的科室，或换一种说法再试。" : "可以换一种说法再试。";
    emptyHint.hidden = false;
  } else {
    statusLine.textContent = `找到 ${hits.length} 条，${tail}`;
    const scores = hits.map((hit) => hit.score).filter(isNumber);
    // Scores lie close together: bars are drawn between the lowest of these hits and the best.
    const best = Math.max(...scores);
    const range = best - Math.min(...scores);
    const share = (score) => (range > 0 ? 1 - ((best - score) / range) * (1 - SHORTEST_BAR) : 1);
    hitList.append(...hits.map((hit, index) => renderHit(hit, index, share)));
    for (const text of hitList.querySelectorAll(".text")) {
      measure(text);
      resized.observe(text);
    }
  }
  showTimings(timings, roundTrip, answer.cached === true);

  const version = asText(asObject(answer.index).version);
  if (version && version !== knownVersion) loadIndex();
}

function titleOf(hit) {
  const title = asText(hit.title);
  if (title) return title;
  const text = asText(hit.text).replace(/\s+/g, " ");
  if (!text) return "（无标题）";
  const letters = [...text];
  const stop = letters.findIndex((letter) => "。！？!?；;".includes(letter));
  if (stop > 0 && stop < 28) return letters.slice(0, stop + 1).join("");
  return letters.length > 28 ? `${letters.slice(0, 28).join("")}…` : text;
}

function renderHit(hit, index, share) {
  const item = element("li", "hit");
  item.dataset.id = String(hit.id ?? "");
  const article = element("article");
  const headingId = `hit-title-${index + 1}`;
  article.setAttribute("aria-labelledby", headingId);

  const head = element("div", "hit-head");
  const rank = element("span", "rank", String(isNumber(hit.rank) ? hit.rank : index + 1));
  rank.setAttribute("aria-hidden", "true"); // the list already numbers its items
  const heading = element("h3", "", titleOf(hit));
  heading.id = headingId;
  head.append(rank, heading);
  article.append(head);

  const text = asText(hit.text);
  if (text) {
    const paragraph = element("p", "text clamped", text);
    paragraph.id = `hit-text-${index + 1}`;
    const toggle = element("button", "plain toggle", "展开");
    toggle.type = "button";
    toggle.hidden = true;
    toggle.setAttribute("aria-expanded", "false");
    toggle.setAttribute("aria-controls", paragraph.id);
    toggle.setAttribute("aria-describedby", headingId);
    toggle.addEventListener("click", () => {
      const open = paragraph.classList.toggle("clamped") === false;
      toggle.textContent = open ? "收起" : "展开";
      toggle.setAttribute("aria-expanded", String(open));
      if (!open) item.scrollIntoView({ block: "nearest" });
    });
    article.append(paragraph, toggle);
  }

  const foot = element("div", "hit-foot");
  const metadata = asObject(hit.metadata);
  const tags = element("ul", "tags");
  for (const [field, label] of [["department", "科室"], ["topic", "主题"]]) {
    for (const value of asList(metadata[field])) {
      const tag = element("li", `tag ${field}`);
      tag.append(element("span", "visually-hidden", `${label}：`), value);
      tags.append(tag);
    }
  }
  if (isNumber(hit.chunk) && hit.chunks > 1) {
    tags.append(element("li", "tag chunk", `第 ${hit.chunk + 1} 段，共 ${hit.chunks} 段`));
  }
  if (tags.childElementCount > 0) foot.append(tags);

  if (isNumber(hit.score)) {
    const relevance = element("div", "relevance");
    const track = element("span", "track");
    track.setAttribute("aria-hidden", "true");
    const fill = element("span", "fill");
    fill.style.width = `${(share(hit.score) * 100).toFixed(1)}%`;
    track.append(fill);
    relevance.append(element("span", "", "得分"), track, element("span", "score", hit.score.toFixed(3)));
    foot.append(relevance);
  }
  if (foot.childElementCount > 0) article.append(foot);

  item.append(article);
  return item;
}

// The button is of use only where the text is really cut, which depends on the width.
function measure(text) {
  if (!text.classList.contains("clamped")) return;
  text.nextElementSibling.hidden = text.scrollHeight <= text.clientHeight + 1;
}

const resized = new ResizeObserver((entries) => {
  for (const entry of entries) measure(entry.target);
});

function showTimings(timings, roundTrip, cached) {
  const bar = element("div", "bar");
  bar.setAttribute("aria-hidden", "true");
  const list = element("dl");
  const add = (stage, label, value) => {
    const group = element("div");
    if (stage) {
      const dot = element("span", "dot");
      dot.dataset.stage = stage;
      dot.setAttribute("aria-hidden", "true");
      const term = element("dt");
      term.append(dot, ` ${label}`);
      group.append(term);
    } else {
      group.append(element("dt", "", label));
    }
    group.append(element("dd", "", `${milliseconds(value)} 毫秒`));
    list.append(group);
  };
  const segment = (stage, value) => {
    if (!(value > 0)) return;
    const part = element("span");
    part.dataset.stage = stage;
    part.style.flexGrow = String(value);
    bar.append(part);
  };

  let known = 0;
  for (const [stage, label] of STAGES) {
    const value = timings[stage];
    if (!isNumber(value)) continue;
    known += Math.max(0, value);
    segment(stage, value);
    add(stage, label, value);
  }
  if (isNumber(timings.total)) add("", "总计", timings.total);
  segment("rest", roundTrip - known); // the network and whatever no stage counts
  add("rest", "客户端往返", roundTrip);
  timingsBox.replaceChildren(bar, list);
  if (cached) {
    const group = element("div");
    group.append(element("dt", "visually-hidden", "缓存"), element("dd", "cached", "缓存命中"));
    list.append(group);
  }
  timingsBox.hidden = false;
}

/* ---------- index and filters ---------- */

async function loadIndex() {
  try {
    const index = await requestJson("index");
    knownVersion = asText(index.version) || knownVersion;
    showIndex(index);
    showDepartments(asList(asObject(index.filters).department ?? []));
  } catch (error) {
    if (error.needsKey && asked === null) showError(error);
    if (knownVersion === null) indexInfo.textContent = "暂时无法读取索引信息。";
  }
}

function showIndex(index) {
  const list = element("dl");
  const rows = [
    ["name", "索引", asText(index.name)],
    ["version", "版本", asText(index.version)],
    ["count", "条目", isNumber(index.count) ? index.count.toLocaleString("zh-CN") : ""],
    ["pair", "编码器", asText(index.pair)],
  ];
  for (const [field, label, value] of rows) {
    if (!value) continue;
    const group = element("div");
    const description = element("dd", "", value);
    description.dataset.field = field;
    group.append(element("dt", "", label), description);
    list.append(group);
  }
  indexInfo.replaceChildren(list);
}

function showDepartments(names) {
  const unique = [...new Set(names)];
  for (const name of selected) if (!unique.includes(name)) selected.delete(name);
  const shown = [...chips.children].map((chip) => chip.dataset.department);
  const same = shown.length === unique.length && unique.every((name, i) => name === shown[i]);
  if (!same) {
    chips.replaceChildren(
      ...unique.map((name) => {
        const chip = element("button", "chip", name);
        chip.type = "button";
        chip.dataset.department = name;
        return chip;
      }),
    );
  }
  departments.hidden = unique.length === 0;
  paintChips();
}

function paintChips() {
  for (const chip of chips.children) {
    chip.setAttribute("aria-pressed", String(selected.has(chip.dataset.department)));
  }
  clearButton.hidden = selected.size === 0;
}

// Changed filters apply at once to the question on screen; a question still
// being written is not sent before it is submitted.
function filtersChanged() {
  paintChips();
  if (asked !== null && input.value.trim() === asked) search(asked);
}

/* ---------- wiring ---------- */

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const query = input.value.trim();
  if (query === "") {
    current?.controller.abort();
    current = null;
    hideError();
    setLoading(false);
    clearResults();
    hitList.removeAttribute("aria-busy");
    input.setAttribute("aria-invalid", "true");
    statusLine.textContent = "请先输入想查询的问题。";
    input.focus();
    return;
  }
  search(query);
});

input.addEventListener("input", () => input.removeAttribute("aria-invalid"));

// Enter that confirms a candidate in an input method must not submit.
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.isComposing || event.keyCode === 229)) event.preventDefault();
});

chips.addEventListener("click", (event) => {
  const chip = event.target.closest("button[data-department]");
  if (!chip) return;
  const name = chip.dataset.department;
  if (!selected.delete(name)) selected.add(name);
  filtersChanged();
});

clearButton.addEventListener("click", () => {
  selected.clear();
  chips.firstElementChild?.focus();
  filtersChanged();
});

for (const question of EXAMPLES) {
  const item = element("li");
  const button = element("button", "example", question);
  button.type = "button";
  button.addEventListener("click", () => {
    input.value = question;
    statusLine.focus();
    search(question);
  });
  item.append(button);
  byId("example-list").append(item);
}
examples.hidden = false;

loadIndex();
