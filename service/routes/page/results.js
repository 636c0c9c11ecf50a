// The answers to one query: a column for each mode, with the hits and the time that each stage took.

import { asList, asObject, asText, byId, element, isNumber, milliseconds } from "./dom.js";

const SHORTEST_BAR = 0.2; // width of the bar of the lowest score shown

const STAGES = [
  ["queue", "排队"],
  ["encode", "编码"],
  ["search", "检索"],
  ["fetch", "取文"],
];

const resultsBox = byId("results");
const statusLine = byId("status");
const legend = byId("legend");
const columns = byId("columns");

// Says that a search is under way. Old answers stay until new ones come.
export function setLoading(on) {
  document.body.classList.toggle("is-loading", on);
  columns.setAttribute("aria-busy", String(on));
  if (on) {
    statusLine.textContent = "正在检索…";
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

// Shows one answer, or two side by side. Each has the `name` of its mode and
// - a `response` with its `roundTrip` in milliseconds; `filtered`, `reranking` and `unanswered` say
//   whether it was to be filtered and ranked again, and whether it seems to have no answer, or
// - a `problem`, with `parts` that show it.
export function showAnswers(answers) {
  clearResults();
  const compared = answers.length > 1;
  resultsBox.classList.toggle("compared", compared);
  statusLine.textContent = compared ? comparison(answers) : sentence(answers[0]);
  columns.append(
    ...answers.map((answer, at) => column(answer, at, compared ? answers[1 - at] : null)),
  );
  legend.hidden = columns.querySelector(".evidence") === null;
  for (const text of columns.querySelectorAll(".text")) {
    measure(text);
    resized.observe(text);
  }
}

const hitsOf = ({ response }) => (response ? response.hits.map(asObject) : []);

function comparison(answers) {
  const parts = answers.map((answer) => `「${answer.name}」${outcome(answer)}`);
  const [first, second] = answers.map((answer) => new Set(hitsOf(answer).map(({ id }) => id)));
  const common = [...first].filter((id) => second.has(id)).length;
  if (answers.every(({ response }) => response)) parts.push(`两边都有 ${common} 条`);
  return `${parts.join("，")}。`;
}

function outcome({ problem, response, unanswered }) {
  if (problem) return "没有完成";
  if (response.hits.length === 0) return "没有结果";
  return unanswered ? "似乎没有答案" : `找到 ${response.hits.length} 条`;
}

function sentence({ response, roundTrip, reranking, unanswered }) {
  const { total } = asObject(response.timings_ms);
  const spent = milliseconds(isNumber(total) ? total : roundTrip);
  const tail = `用时 ${spent} 毫秒${response.cached === true ? "（来自缓存）" : ""}`;
  const count = response.hits.length;
  if (count === 0) return `没有符合条件的结果，${tail}`;
  const failed = asList(response.failed_channels ?? []).some((channel) => channel !== "rerank");
  const notes = [
    failed ? "（部分查找方式没有完成）" : "",
    reranking && response.reranked !== true ? "（重新排序没有完成，保持原来的顺序）" : "",
  ].join("");
  return unanswered
    ? `资料中似乎没有这个问题的答案，以下 ${count} 条只是内容相近${notes}，${tail}`
    : `找到 ${count} 条${notes}，${tail}`;
}

// A column; with the `other` one it has a heading and a status line of its own.
function column(answer, at, other) {
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
  const { response, roundTrip, filtered } = answer;
  node.append(timings(asObject(response.timings_ms), roundTrip, response.cached === true));
  const hits = hitsOf(answer);
  if (hits.length === 0) {
    const hint = filtered ? "可以减少筛选条件，或换一种说法再试。" : "可以换一种说法再试。";
    node.append(element("p", "empty-hint", hint));
    return node;
  }
  const scores = hits.map((hit) => hit.score).filter(isNumber);
  // Scores lie close together, so bars span the range from the lowest score shown to the best.
  const best = Math.max(...scores);
  const range = best - Math.min(...scores);
  const share = (score) => (range > 0 ? 1 - ((best - score) / range) * (1 - SHORTEST_BAR) : 1);
  const list = element("ol", "hits");
  list.append(
    ...hits.map((hit, index) => {
      const prefix = `hit-${at + 1}-${index + 1}`;
      return renderHit(hit, index, prefix, other ? "h4" : "h3", share, placeIn(other, hit.id));
    }),
  );
  node.append(list);
  return node;
}

// Where the other column has a hit; "" if there is none to compare with.
function placeIn(other, id) {
  if (!other?.response) return "";
  const place = hitsOf(other).findIndex((hit) => hit.id === id);
  return `「${other.name}」${place < 0 ? "未出现" : `第 ${place + 1}`}`;
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

// The text with its best sentence in bold. Offsets count code points, those of strings do not.
function withEvidence(text, { start, end }) {
  if (!isNumber(start) || !isNumber(end)) return [asText(text)];
  const letters = [...text];
  const part = (from, to) => letters.slice(from, to).join("");
  return [part(0, start), element("strong", "evidence", part(start, end)), part(end)];
}

function renderHit(hit, index, prefix, headingTag, share, place) {
  const item = element("li", "hit");
  item.dataset.id = String(hit.id ?? "");
  const article = element("article");
  const headingId = `${prefix}-title`;
  article.setAttribute("aria-labelledby", headingId);

  const head = element("div", "hit-head");
  const rank = element("span", "rank", String(isNumber(hit.rank) ? hit.rank : index + 1));
  rank.setAttribute("aria-hidden", "true"); // the list already numbers its items
  const heading = element(headingTag, "", titleOf(hit));
  heading.id = headingId;
  head.append(rank, heading);
  article.append(head);

  const text = asText(hit.text);
  if (text) {
    const paragraph = element("p", "text clamped");
    paragraph.append(...withEvidence(hit.text, asObject(hit.evidence)));
    paragraph.id = `${prefix}-text`;
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
  if (place) foot.append(element("p", "place", place));

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

// The button is shown only where the text is cut off, which depends on the width.
function measure(text) {
  if (!text.classList.contains("clamped")) return;
  text.nextElementSibling.hidden = text.scrollHeight <= text.clientHeight + 1;
}

const resized = new ResizeObserver((entries) => {
  for (const entry of entries) measure(entry.target);
});

function timings(stages, roundTrip, cached) {
  const box = element("div", "timings");
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
    const value = stages[stage];
    if (!isNumber(value)) continue;
    known += Math.max(0, value);
    segment(stage, value);
    add(stage, label, value);
  }
  if (isNumber(stages.total)) add("", "总计", stages.total);
  segment("rest", roundTrip - known); // the network, and time outside these stages
  add("rest", "客户端往返", roundTrip);
  if (cached) {
    const group = element("div");
    group.append(element("dt", "visually-hidden", "缓存"), element("dd", "cached", "缓存命中"));
    list.append(group);
  }
  box.append(bar, list);
  return box;
}
