// The answers to one query: a column for each mode, with its hits or what to try when there are none.

import { asList, asObject, button, byId, element, isNumber, milliseconds } from "./dom.js";
import { renderHit } from "./hits.js";
import { isEnglish, t } from "./language.js";
import { termsOfQuestion } from "./marks.js";
import { isDeveloper } from "./options.js";

const SHORTEST_BAR = 0.2; // width of the bar of the lowest score shown
const STAGES = ["queue", "encode", "search", "fetch"];

const resultsBox = byId("results");
const statusLine = byId("status");
const legend = byId("legend");
const columns = byId("columns");

// Says that a search is under way. Old answers stay until new ones come.
export function setLoading(on) {
  document.body.classList.toggle("is-loading", on);
  columns.setAttribute("aria-busy", String(on));
  if (on) {
    statusLine.textContent = t("results.loading");
    if (columns.childElementCount === 0) columns.append(skeleton());
  } else {
    for (const node of columns.querySelectorAll(".skeletons")) node.remove();
  }
}

function skeleton() {
  const list = element("div", "skeletons hits");
  list.setAttribute("aria-hidden", "true");
  for (let i = 0; i < 3; i += 1) list.append(element("div", "skeleton"));
  return list;
}

export function clearResults() {
  resized.disconnect();
  columns.replaceChildren();
  resultsBox.classList.remove("compared");
  legend.hidden = true;
  statusLine.textContent = "";
}

// Shows one answer to a question, or two side by side. Each has the `name` of its mode and
// - a `response` with its `roundTrip` in milliseconds; `reranking` and `unanswered` say whether it was
//   to be ranked again, and whether it seems to have no answer, or
// - a `problem`, with `parts` that show it.
// `remedies` are the buttons of what to try, each with the `words` and what it does (`act`); `more`, if
// there can be more hits, is called for them.
export function showAnswers(question, answers, remedies, more) {
  clearResults();
  const compared = answers.length > 1;
  resultsBox.classList.toggle("compared", compared);
  statusLine.textContent = compared ? comparison(answers) : sentence(answers[0]);
  const terms = termsOfQuestion(question);
  columns.append(
    ...answers.map((answer, at) => column(answer, at, compared ? answers[1 - at] : null, terms, remedies)),
  );
  if (more && !compared) columns.append(button("more", t("results.more"), more));
  legend.hidden = columns.querySelector(".evidence, .text mark") === null;
  for (const text of columns.querySelectorAll(".hit .text")) {
    measure(text);
    resized.observe(text);
  }
}

const hitsOf = ({ response }) => (response ? response.hits.map(asObject) : []);

function comparison(answers) {
  const parts = answers.map((answer) =>
    t("results.named", { name: answer.name, outcome: outcome(answer) }),
  );
  const [first, second] = answers.map((answer) => new Set(hitsOf(answer).map(({ id }) => id)));
  const count = [...first].filter((id) => second.has(id)).length;
  if (answers.every(({ response }) => response)) parts.push(t("results.common", { count }));
  return `${parts.join(t("results.comma"))}${t("results.stop")}`;
}

function outcome({ problem, response, unanswered }) {
  if (problem) return t("results.failed");
  if (response.hits.length === 0) return t("results.none");
  if (unanswered) return t("results.unanswered.short");
  return t("results.found", { count: response.hits.length });
}

function sentence({ response, roundTrip, reranking, unanswered }) {
  const { total } = asObject(response.timings_ms);
  const time = milliseconds(isNumber(total) ? total : roundTrip);
  const cached = response.cached === true ? t("results.cached") : "";
  const tail = isDeveloper() ? `${t("results.spent", { time })}${cached}` : "";
  const count = response.hits.length;
  if (count === 0) return `${t("results.none")}${tail}`;
  const failed = asList(response.failed_channels ?? []).some((channel) => channel !== "rerank");
  const notes = [
    failed ? t("results.partly") : "",
    reranking && response.reranked !== true ? t("results.kept") : "",
  ].join("");
  return `${t(unanswered ? "results.unanswered" : "results.found", { count })}${notes}${tail}`;
}

// What to try when there are no hits, or none that seems to answer.
function advice(remedies) {
  const list = element("ul", "advice");
  for (const { words, act } of remedies) {
    const item = element("li");
    item.append(button("plain", words, act));
    list.append(item);
  }
  const hints = ["advice.words", ...(isEnglish() ? ["advice.chinese"] : []), "advice.elsewhere"];
  list.append(...hints.map((hint) => element("li", "", t(hint))));
  return list;
}

// A column; with the `other` one it has a heading and a status line of its own.
function column(answer, at, other, terms, remedies) {
  const node = element(other ? "section" : "div", "column");
  if (other) {
    const heading = element("h3", "", answer.name);
    heading.id = `column-${at + 1}`;
    node.setAttribute("aria-labelledby", heading.id);
    node.append(heading);
  }
  if (answer.problem) {
    const alert = element("div", "alert");
    alert.append(...answer.parts);
    node.append(alert);
    return node;
  }
  if (other) node.append(element("p", "column-status", sentence(answer)));
  const { response, roundTrip, unanswered } = answer;
  node.append(timings(asObject(response.timings_ms), roundTrip, response.cached === true));
  const hits = hitsOf(answer);
  if (hits.length === 0 || unanswered) node.append(advice(other ? [] : remedies));
  if (hits.length === 0) return node;
  const scores = hits.map((hit) => hit.score).filter(isNumber);
  // Scores lie close together, so bars span the range from the lowest score shown to the best.
  const best = Math.max(...scores);
  const range = best - Math.min(...scores);
  const share = (score) => (range > 0 ? 1 - ((best - score) / range) * (1 - SHORTEST_BAR) : 1);
  const shown = { prefix: `hit-${at + 1}`, tag: other ? "h4" : "h3", terms, share };
  const list = element("ol", "hits");
  list.append(
    ...hits.map((hit, rank) =>
      renderHit(hit, rank, { ...shown, index: asObject(response.index), place: placeIn(other, hit.id) }),
    ),
  );
  node.append(list);
  return node;
}

// Where the other column has a hit; "" if there is none to compare with.
function placeIn(other, id) {
  if (!other?.response) return "";
  const place = hitsOf(other).findIndex((hit) => hit.id === id) + 1;
  return t("hit.place", { name: other.name, place });
}

// Focuses the hit that is `step` after the focused one, the first one if there is none.
export function moveTo(step) {
  const hits = [...columns.querySelectorAll(".hit")];
  const at = hits.indexOf(document.activeElement?.closest(".hit"));
  focusHit(at < 0 ? 0 : at + step);
}

export function focusHit(at) {
  const hit = columns.querySelectorAll(".hit")[at];
  hit?.focus({ preventScroll: true });
  hit?.scrollIntoView({ block: "nearest" });
}

export function focusHitOf(id) {
  const hits = [...columns.querySelectorAll(".hit")];
  focusHit(hits.findIndex((hit) => hit.dataset.id === id));
}

// The button is shown only where the text is cut off, which depends on the width.
function measure(text) {
  const toggle = text.closest(".hit").querySelector(".toggle");
  if (text.classList.contains("clamped")) toggle.hidden = text.scrollHeight <= text.clientHeight + 1;
}

const resized = new ResizeObserver((entries) => {
  for (const entry of entries) measure(entry.target);
});

function timings(stages, roundTrip, cached) {
  const box = element("div", "timings");
  const bar = element("div", "bar");
  bar.setAttribute("aria-hidden", "true");
  const list = element("dl");
  const add = (stage, value, dotted = true) => {
    const group = element("div");
    const term = element("dt");
    if (dotted) {
      const dot = element("span", "dot");
      dot.dataset.stage = stage;
      dot.setAttribute("aria-hidden", "true");
      term.append(dot, " ");
    }
    term.append(t(`stage.${stage}`));
    group.append(term, element("dd", "", t("stage.ms", { time: milliseconds(value) })));
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
  for (const stage of STAGES) {
    const value = stages[stage];
    if (!isNumber(value)) continue;
    known += Math.max(0, value);
    segment(stage, value);
    add(stage, value);
  }
  if (isNumber(stages.total)) add("total", stages.total, false);
  segment("rest", roundTrip - known); // the network, and time outside these stages
  add("rest", roundTrip);
  if (cached) {
    const group = element("div");
    const term = element("dt", "visually-hidden", t("stage.cache"));
    group.append(term, element("dd", "cached", t("stage.cached")));
    list.append(group);
  }
  box.append(bar, list);
  return box;
}
