// The search page. Queries are medical and private: they are sent in the body of POST /search and
// stored nowhere (no storage, no console; in a link only where the reader asks for one, share.js).
// Addresses are relative: a proxy may strip a prefix.

import { asObject, asText, byId, element, isNumber } from "./dom.js";
import { onFiltersChanged, selectFilter, selectedFilter, showFilters } from "./filters.js";
import { chooseOptions, chosenOptions, modeName, onOptionsChanged, showOptions } from "./options.js";
import { Problem, hideProblem, problemFrom, problemOf, problemParts, showProblem } from "./problems.js";
import { clearResults, setLoading, showAnswers } from "./results.js";
import { offerLink, takeLink, withdrawLink } from "./share.js";

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

let current = null; // the controller of the search in flight
let lastQuery = null; // the last query sent, for retries and changed filters
let link = null; // what an opened link asks for, until the index is known
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

// Returns the answer in one mode, or the problem; `asked` is the query with its options and filter.
async function answerTo(asked, mode, signal) {
  const { query, rerank, filter } = asked;
  const body = { query, top_k: TOP_K, include: ["text", "metadata"], evidence: true };
  const filtered = Object.keys(filter).length > 0;
  if (filtered) body.filter = filter;
  if (mode) body.mode = mode;
  if (rerank) body.rerank = true;
  const started = performance.now();
  try {
    const response = await requestJson("search", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    if (!Array.isArray(response.hits)) throw new SyntaxError("no hits");
    const roundTrip = performance.now() - started;
    const unanswered = isUnanswered(response);
    return { name: modeName(mode), response, roundTrip, filtered, reranking: rerank, unanswered };
  } catch (error) {
    return { name: modeName(mode), problem: problemOf(error) };
  }
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

  const asked = { query, ...chosenOptions(), filter: selectedFilter() };
  const modes = asked.compare ? [asked.mode, asked.compare] : [asked.mode];
  const answers = await Promise.all(modes.map((mode) => answerTo(asked, mode, controller.signal)));
  clearTimeout(loadingTimer);
  clearTimeout(timeout);
  if (current !== controller) return; // a newer search has started
  current = null;
  show(asked, answers);
}

function show(asked, answers) {
  clear();
  const problems = answers.flatMap(({ problem }) => problem ?? []);
  const alike = problems.every(({ heading }) => heading === problems[0].heading);
  if (problems.length === answers.length && alike) {
    report(problems[0]);
    return;
  }
  for (const answer of answers) {
    if (answer.problem) answer.parts = problemParts(answer.problem, "h4", retry, useKey);
  }
  showAnswers(answers);
  offerLink(asked);
  const versions = answers.map(({ response }) => asText(asObject(response?.index).version));
  if (versions.some((version) => version && version !== knownVersion)) loadIndex();
}

function clear() {
  setLoading(false);
  clearResults();
  withdrawLink();
}

function isUnanswered({ answerable, mode }) {
  return isNumber(answerable) && isNumber(thresholds[mode]) && answerable < thresholds[mode];
}

function report(problem) {
  showProblem(problem, "h2", lastQuery === null ? null : retry, useKey);
}

function retry() {
  statusLine.focus();
  begin(lastQuery);
}

function useKey(key) {
  accessKey = key;
  statusLine.focus();
  hideProblem();
  begin(lastQuery);
}

// Reads the index if it is not known yet, does what a link asks for, and searches if there is a query.
async function begin(query) {
  if (knownVersion === null) await loadIndex();
  if (link && knownVersion !== null) {
    chooseOptions(link);
    selectFilter(link.filter);
    link = null;
  }
  if (query) search(query);
}

function openLink() {
  link = takeLink();
  if (link?.query) input.value = link.query;
  begin(link?.query);
}

/* ---------- index ---------- */

async function loadIndex() {
  try {
    const index = await requestJson("index");
    knownVersion = asText(index.version) || knownVersion;
    thresholds = asObject(index.answerable_thresholds);
    showIndex(index);
    showOptions(index);
    showFilters(index.filters);
  } catch (error) {
    if (error.needsKey && lastQuery === null) report(error);
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

/* ---------- events ---------- */

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const query = input.value.trim();
  if (query === "") {
    current?.abort();
    current = null;
    hideProblem();
    clear();
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

// A changed option or filter applies at once to the query on screen, but not to one that is being
// edited.
function searchAgain() {
  if (lastQuery !== null && input.value.trim() === lastQuery) search(lastQuery);
}

onFiltersChanged(searchAgain);
onOptionsChanged(searchAgain);

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

// A proxy in front of the service need not publish the documentation.
async function checkDocumentation() {
  const { ok } = await fetch("docs", { method: "HEAD", referrerPolicy: "no-referrer" });
  byId("docs-link").hidden = !ok;
}

checkDocumentation().catch(() => {});
addEventListener("hashchange", openLink);
openLink();
