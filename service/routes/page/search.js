// The search page. A question is kept in the history of this tab, on this device only, so that going
// back and reloading show it again. It stands neither in the address nor in the title.

import { findAnswerServer, offerAnswer, withdrawAnswer } from "./answer.js";
import { hasDocumentation, readIndex, sendSearch, useAccessKey } from "./api.js";
import { asObject, asText, byId, element, isNumber } from "./dom.js";
import "./dialogs.js";
import { clearFilters, onFiltersChanged, selectFilter, selectedFilter, showFilters } from "./filters.js";
import { onReloaded, showIndex, showNoIndex } from "./index_view.js";
import { chooseIndex, chosenIndex, offerIndexes, onIndexChosen } from "./indexes.js";
import { CHINESE, isEnglish, onLanguageChanged, startLanguage, t } from "./language.js";
import {
  chooseMode, chooseOptions, chosenOptions, modeName, onOptionsChanged, showOptions, widestMode,
} from "./options.js";
import { hideProblem, problemOf, problemParts, showProblem } from "./problems.js";
import { clearResults, focusHit, moveTo, setLoading, showAnswers } from "./results.js";
import { offerLink, takeLink, withdrawLink } from "./share.js";

const TOP_K = 10;
const MOST_HITS = 100;
const CITED = 5; // hits that an answer is written from
const TIMEOUT_MS = 30_000;
const LOADING_DELAY_MS = 150;
const INDEX_WAIT_MS = 3_000; // a first search waits so long for what the service says of its index
const NEAR_LIMIT = 0.8; // of the longest question, from where on the page counts what is left

const EXAMPLES = [
  ["高血压患者饮食上要注意什么？", "What to eat with high blood pressure"],
  ["孩子发烧到 39 度应该怎么处理？", "A child with a fever of 39 °C"],
  ["糖尿病早期有哪些症状？", "Early symptoms of diabetes"],
  ["经常胃痛反酸是什么原因？", "Causes of stomach pain and acid reflux"],
  ["晚上总是睡不着怎么调理？", "Trouble sleeping at night"],
  ["腰椎间盘突出需要手术吗？", "Does a slipped disc need surgery"],
];

const form = byId("search-form");
const input = byId("query");
const clearButton = byId("clear");
const counter = byId("counter");
const examples = byId("examples");
const statusLine = byId("status");

let current = null; // the controller of the search in flight
let lastQuery = null; // the last query sent, for retries and changed filters
let last = null; // the search on screen, with its answers
let offered = null; // the search whose answer is offered
let link = null; // what a link or the history asks for, until the index is known
let loading = null; // the reading of the indexes, while it runs
let knownVersion = null;
let knownIndex = {};
let thresholds = {}; // of the answerable score, by mode
let longest = 2000; // characters of a question, until the service says otherwise
let refused = Infinity; // number of hits that the service has refused

/* ---------- searching ---------- */

// Returns the answer in one mode, or the problem; `asked` is the query with its options and filter.
async function answerTo(asked, mode, signal) {
  const { query, rerank, filter, top_k } = asked;
  const body = { query, top_k, include: ["text", "metadata"], evidence: true };
  if (Object.keys(filter).length > 0) body.filter = filter;
  if (mode) body.mode = mode;
  if (rerank) body.rerank = true;
  const started = performance.now();
  try {
    const response = await sendSearch(body, signal);
    if (!Array.isArray(response.hits)) throw new SyntaxError("no hits");
    const roundTrip = performance.now() - started;
    return { mode, response, roundTrip, reranking: rerank, unanswered: isUnanswered(response) };
  } catch (error) {
    return { mode, problem: problemOf(error) };
  }
}

function isUnanswered({ answerable, mode }) {
  return isNumber(answerable) && isNumber(thresholds[mode]) && answerable < thresholds[mode];
}

// Searches, and shows the answers; returns whether they are shown, and no newer ones are wanted.
async function search(query, top_k = TOP_K) {
  current?.abort();
  const controller = new AbortController();
  current = controller;
  lastQuery = query;
  withdrawAnswer();

  document.body.classList.add("asked");
  examples.hidden = true;
  hideProblem();
  input.removeAttribute("aria-invalid");
  const loadingTimer = setTimeout(() => setLoading(true), LOADING_DELAY_MS);
  const timeout = setTimeout(
    () => controller.abort(new DOMException("timeout", "TimeoutError")),
    TIMEOUT_MS,
  );

  if (loading) { // its modes, filters and thresholds count from the first search on
    await Promise.race([loading, new Promise((done) => setTimeout(done, INDEX_WAIT_MS))]);
    if (current !== controller) return false; // a newer search has started
  }
  const asked = {
    query, top_k, ...chosenOptions(), filter: selectedFilter(), index: chosenIndex(),
  };
  remember(asked);
  const modes = asked.compare ? [asked.mode, asked.compare] : [asked.mode];
  const answers = await Promise.all(modes.map((mode) => answerTo(asked, mode, controller.signal)));
  clearTimeout(loadingTimer);
  clearTimeout(timeout);
  if (current !== controller) return false; // a newer search has started
  current = null;
  const refusal = answers.find(({ problem }) => problem?.code === "top_k_too_large");
  if (refusal && top_k > TOP_K && last) {
    refused = top_k;
    setLoading(false);
    show();
    return false;
  }
  last = { asked, answers };
  show();
  return true;
}

async function more() {
  const { asked, answers } = last;
  const before = answers[0].response.hits.length;
  if (await search(asked.query, Math.min(asked.top_k + TOP_K, MOST_HITS))) focusHit(before);
}

function show() {
  const { asked, answers } = last;
  clear();
  const problems = answers.flatMap(({ problem }) => problem ?? []);
  const alike = problems.every(({ heading }) => heading === problems[0].heading);
  const limit = problems.find(({ code }) => code === "text_too_long")?.limit;
  if (isNumber(limit)) {
    longest = limit;
    count();
  }
  if (problems.length === answers.length && alike) {
    report(problems[0]);
    return;
  }
  for (const answer of answers) {
    answer.name = modeName(answer.mode);
    if (answer.problem) answer.parts = problemParts(answer.problem, "h4", retry, useKey);
  }
  const found = answers[0].response?.hits.length ?? 0;
  const isLast = found < asked.top_k || asked.top_k >= Math.min(MOST_HITS, refused - TOP_K);
  showAnswers(asked.query, answers, remediesFor(asked), isLast ? null : more);
  offerLink(asked);
  if (last !== offered && found > 0) {
    const { query, filter, mode } = asked;
    offerAnswer({ query, filter, top_k: CITED, ...(mode ? { mode } : {}) });
    offered = last;
  }
  const versions = answers.map(({ response }) => asText(asObject(response?.index).version));
  if (versions.some((version) => version && version !== knownVersion)) loadIndex();
}

// Returns what else the reader can search with.
function remediesFor({ query, filter }) {
  const again = (change) => () => {
    change();
    statusLine.focus();
    search(query);
  };
  const remedies = [];
  if (Object.keys(filter).length > 0) {
    remedies.push({ words: t("advice.filters"), act: again(clearFilters) });
  }
  const mode = widestMode();
  if (mode) remedies.push({ words: t("advice.mode"), act: again(() => chooseMode(mode)) });
  return remedies;
}

function clear() {
  setLoading(false);
  clearResults();
  withdrawLink();
}

function report(problem) {
  showProblem(problem, "h2", lastQuery === null ? null : retry, useKey);
}

function retry() {
  statusLine.focus();
  begin(lastQuery);
}

function useKey(key) {
  useAccessKey(key);
  statusLine.focus();
  hideProblem();
  begin(lastQuery);
}

// Reads the index if it is not known yet, does what a link or the history asks for, and searches if
// there is a query.
async function begin(query) {
  if (knownVersion === null) {
    loading ??= loadIndexes().finally(() => {
      loading = null;
    });
    await loading;
  }
  if (link && knownVersion !== null) {
    if (chooseIndex(link.index)) await loadIndex();
    chooseOptions(link);
    selectFilter(link.filter);
    link = null;
  }
  if (query) search(query);
}

function goTo(wanted) {
  link = wanted;
  if (wanted?.query) write(wanted.query);
  begin(wanted?.query);
}

/* ---------- the history of this tab ---------- */

// Keeps a search in the entry of the history: a new one for another question.
function remember({ query, mode, compare, rerank, filter, index }) {
  const state = { query, mode, compare, rerank, filter, index };
  const known = history.state?.query;
  if (known === undefined || known === query) history.replaceState(state, "");
  else history.pushState(state, "");
}

function remembered() {
  const { query, mode, compare, rerank, filter, index } = asObject(history.state);
  if (!asText(query)) return null;
  return { query: asText(query), mode, compare, rerank, filter: asObject(filter), index };
}

function home() {
  current?.abort();
  current = null;
  lastQuery = null;
  last = null;
  withdrawAnswer();
  document.body.classList.remove("asked");
  hideProblem();
  clear();
  write("");
  examples.hidden = false;
}

addEventListener("popstate", () => {
  if (location.hash) return; // a link that is opened in this page: hashchange follows
  const wanted = remembered();
  if (wanted) goTo(wanted);
  else home();
});

/* ---------- index ---------- */

async function loadIndexes() {
  await offerIndexes().catch(() => {}); // reading the index says what is wrong
  if (link) chooseIndex(link.index);
  await loadIndex();
}

onIndexChosen(async () => {
  clearFilters();
  await loadIndex();
  if (lastQuery !== null) search(lastQuery);
});

async function loadIndex() {
  try {
    takeIndex(await readIndex());
    await findAnswerServer();
  } catch (error) {
    if (error.needsKey && lastQuery === null) report(error);
    showNoIndex();
  }
}

function takeIndex(index) {
  knownVersion = asText(index.version) || knownVersion;
  knownIndex = index;
  thresholds = asObject(index.answerable_thresholds);
  showIndex(index);
  showOptions(index);
  showFilters(index.filters, isNumber(index.documents) ? index.documents : 0, index.filter_counts);
}

onReloaded(takeIndex);

/* ---------- the question ---------- */

function write(text) {
  input.value = text;
  count();
}

// Lets the box grow with its text, and counts what is left of the longest question.
function count() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`; // with its border
  clearButton.hidden = input.value === "";
  const { length } = [...input.value.trim()];
  const isNear = length > NEAR_LIMIT * longest;
  counter.hidden = !isNear;
  counter.classList.toggle("over", length > longest);
  counter.textContent = isNear ? t("query.left", { left: longest - length }) : "";
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const query = input.value.trim();
  if (query === "") {
    current?.abort();
    current = null;
    hideProblem();
    clear();
    input.setAttribute("aria-invalid", "true");
    statusLine.textContent = t("query.empty");
    input.focus();
    return;
  }
  search(query);
});

input.addEventListener("input", () => {
  input.removeAttribute("aria-invalid");
  count();
});

// Enter searches, unless it confirms a candidate of an input method; Shift+Enter starts a new line.
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  form.requestSubmit();
});

clearButton.addEventListener("click", () => {
  if (history.state) history.pushState(null, "");
  home();
  input.focus();
});

/* ---------- events ---------- */

// A changed option or filter applies at once to the query on screen, but not to one that is being
// edited.
function searchAgain() {
  if (lastQuery !== null && input.value.trim() === lastQuery) search(lastQuery);
}

function showAgain() {
  if (last && current === null) show();
}

onFiltersChanged(searchAgain);
onOptionsChanged(searchAgain, showAgain);

const isTyping = (node) => node.closest("input, textarea, select, dialog") !== null;

document.addEventListener("keydown", (event) => {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || isTyping(target)) return;
  if (key === "/") {
    event.preventDefault();
    input.focus();
    input.select();
  } else if (key === "j" || key === "k") moveTo(key === "j" ? 1 : -1);
  else if (key === "Enter" && target.matches(".hit")) {
    event.preventDefault(); // else it would press the button of the dialog that gets the focus
    target.querySelector(".open").click();
  }
});

byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address stays as it is
  if (byId("columns").querySelector(".hit")) focusHit(0);
  else statusLine.focus();
});

function showExamples() {
  byId("example-list").replaceChildren(
    ...EXAMPLES.map(([question, meaning]) => {
      const item = element("li");
      const button = element("button", "example");
      button.type = "button";
      const words = element("span", "", question);
      words.lang = CHINESE;
      const both = element("span");
      both.append(words);
      if (isEnglish()) both.append(element("span", "meaning", meaning));
      button.append(both);
      button.addEventListener("click", () => {
        write(question);
        statusLine.focus();
        search(question);
      });
      item.append(button);
      return item;
    }),
  );
}

onLanguageChanged(() => {
  showExamples();
  count();
  if (knownVersion !== null) takeIndex(knownIndex);
  showAgain();
});

startLanguage();
examples.hidden = false;
hasDocumentation()
  .then((has) => {
    byId("docs-link").hidden = !has;
  })
  .catch(() => {});
addEventListener("hashchange", () => {
  const wanted = takeLink();
  if (wanted) goTo(wanted);
});
goTo(takeLink() ?? remembered());
