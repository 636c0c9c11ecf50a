// The search page. Queries are medical and private: they are sent in the body of POST /search and
// stored nowhere (no URL, no storage, no console). Addresses are relative: a proxy may strip a prefix.

import { asObject, asText, byId, element, isNumber } from "./dom.js";
import { isFiltered, onFiltersChanged, selectedFilter, showFilters } from "./filters.js";
import { Problem, hideProblem, problemFrom, problemOf, showProblem } from "./problems.js";
import { clearResults, setLoading, showResults } from "./results.js";

const TOP_K = 10;
const TIMEOUT_MS = 30_000;
const LOADING_DELAY_MS = 150;

const EXAMPLES = [
  "高血压患者饮食上要注意什么？",
  "孩子发烧到 39 度应该怎么处理？",
  "糖尿病早期有哪些症状？",
  "经常胃痛反酸是什么原因？",
  "晚上总是睡不着怎么调理？",
  "腰椎间盘突出需要手术吗？",
];

const form = byId("search-form");
const input = byId("query");
const examples = byId("examples");
const statusLine = byId("status");
const indexInfo = byId("index-info");
const modeBox = byId("modes");
const modeSelect = byId("mode");

const MODES = { hybrid: "意思和字词", dense: "意思", lexical: "字词" };

let current = null; // the controller of the search in flight
let lastQuery = null; // the last query sent, for retries and changed filters
let knownVersion = null;
let thresholds = {}; // of the answerable score, by mode
let accessKey = ""; // in memory only, until the page is closed

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
  const body = { query, top_k: TOP_K, include: ["text", "metadata"], evidence: true };
  if (isFiltered()) body.filter = selectedFilter();
  if (!modeBox.hidden) body.mode = modeSelect.value;
  return JSON.stringify(body);
}

async function search(query) {
  current?.abort();
  const controller = new AbortController();
  current = controller;
  lastQuery = query;

  examples.hidden = true;
  hideProblem();
  input.removeAttribute("aria-invalid");
  const loadingTimer = setTimeout(() => setLoading(true), LOADING_DELAY_MS);
  const timeout = setTimeout(
    () => controller.abort(new DOMException("timeout", "TimeoutError")),
    TIMEOUT_MS,
  );

  const started = performance.now();
  try {
    const response = await requestJson("search", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: searchBody(query),
      signal: controller.signal,
    });
    if (current !== controller) return; // a newer search has started
    if (!Array.isArray(response.hits)) throw new SyntaxError("no hits");
    setLoading(false);
    showResults(response, performance.now() - started, isFiltered(), isUnanswered(response));
    const version = asText(asObject(response.index).version);
    if (version && version !== knownVersion) loadIndex();
  } catch (error) {
    if (current !== controller) return;
    setLoading(false);
    clearResults();
    report(problemOf(error));
  } finally {
    clearTimeout(loadingTimer);
    clearTimeout(timeout);
    if (current === controller) current = null;
  }
}

function isUnanswered({ answerable, mode }) {
  return isNumber(answerable) && isNumber(thresholds[mode]) && answerable < thresholds[mode];
}

function report(problem) {
  const retry = () => {
    statusLine.focus();
    search(lastQuery);
  };
  showProblem(problem, lastQuery === null ? null : retry, (key) => {
    accessKey = key;
    statusLine.focus();
    if (lastQuery !== null) search(lastQuery);
    else hideProblem();
    loadIndex();
  });
}

/* ---------- index ---------- */

async function loadIndex() {
  try {
    const index = await requestJson("index");
    knownVersion = asText(index.version) || knownVersion;
    thresholds = asObject(index.answerable_thresholds);
    showIndex(index);
    showModes(index.modes);
    showFilters(index.filters);
  } catch (error) {
    if (error.needsKey && lastQuery === null) report(error);
    if (knownVersion === null) indexInfo.textContent = "暂时无法读取索引信息。";
  }
}

// The modes of the index, the default first; the chosen one stays chosen in a new version.
function showModes(modes) {
  const known = (Array.isArray(modes) ? modes : []).filter((mode) => Object.hasOwn(MODES, mode));
  const chosen = modeSelect.value;
  modeSelect.replaceChildren(...known.map((mode) => new Option(MODES[mode], mode)));
  if (known.includes(chosen)) modeSelect.value = chosen;
  modeBox.hidden = known.length < 2;
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

/* ---------- events ---------- */

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const query = input.value.trim();
  if (query === "") {
    current?.abort();
    current = null;
    hideProblem();
    setLoading(false);
    clearResults();
    input.setAttribute("aria-invalid", "true");
    statusLine.textContent = "请先输入想查询的问题。";
    input.focus();
    return;
  }
  search(query);
});

input.addEventListener("input", () => input.removeAttribute("aria-invalid"));

// Enter that confirms a candidate of an input method does not submit.
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.isComposing || event.keyCode === 229)) event.preventDefault();
});

// A changed mode or filter applies at once to the query on screen, but not to one that is being
// edited.
function searchAgain() {
  if (lastQuery !== null && input.value.trim() === lastQuery) search(lastQuery);
}

onFiltersChanged(searchAgain);
modeSelect.addEventListener("change", searchAgain);

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
