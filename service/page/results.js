// The hits of one response, and the time that each stage took.

import { asList, asObject, asText, byId, element, isNumber, milliseconds } from "./dom.js";

const SHORTEST_BAR = 0.2; // width of the bar of the lowest score shown

const STAGES = [
  ["queue", "排队"],
  ["encode", "编码"],
  ["search", "检索"],
  ["fetch", "取文"],
];

const statusLine = byId("status");
const timingsBox = byId("timings");
const hitList = byId("hits");
const emptyHint = byId("empty-hint");

export function setLoading(on) {
  document.body.classList.toggle("is-loading", on);
  if (on) {
    statusLine.textContent = "正在检索…";
    hitList.setAttribute("aria-busy", "true");
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
    hitList.removeAttribute("aria-busy");
    for (const item of hitList.querySelectorAll(".skeleton")) item.remove();
  }
}

export function clearResults() {
  for (const text of hitList.querySelectorAll(".text")) resized.unobserve(text);
  hitList.replaceChildren();
  timingsBox.hidden = true;
  timingsBox.replaceChildren();
  emptyHint.hidden = true;
  statusLine.textContent = "";
}

export function showResults(response, roundTrip, filtered, unanswered) {
  clearResults();
  const timings = asObject(response.timings_ms);
  const hits = response.hits.map(asObject);
  const spent = milliseconds(isNumber(timings.total) ? timings.total : roundTrip);
  const tail = `用时 ${spent} 毫秒${response.cached === true ? "（来自缓存）" : ""}`;

  if (hits.length === 0) {
    statusLine.textContent = `没有符合条件的结果，${tail}`;
    emptyHint.textContent = filtered
      ? "可以减少筛选条件，或换一种说法再试。"
      : "可以换一种说法再试。";
    emptyHint.hidden = false;
  } else {
    const failed = Array.isArray(response.failed_channels) && response.failed_channels.length > 0;
    const partial = failed ? "（部分查找方式没有完成）" : "";
    statusLine.textContent = unanswered
      ? `资料中似乎没有这个问题的答案，以下 ${hits.length} 条只是内容相近${partial}，${tail}`
      : `找到 ${hits.length} 条${partial}，${tail}`;
    const scores = hits.map((hit) => hit.score).filter(isNumber);
    // Scores lie close together, so bars span the range from the lowest score shown to the best.
    const best = Math.max(...scores);
    const range = best - Math.min(...scores);
    const share = (score) => (range > 0 ? 1 - ((best - score) / range) * (1 - SHORTEST_BAR) : 1);
    hitList.append(...hits.map((hit, index) => renderHit(hit, index, share)));
    for (const text of hitList.querySelectorAll(".text")) {
      measure(text);
      resized.observe(text);
    }
  }
  showTimings(timings, roundTrip, response.cached === true);
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
    const paragraph = element("p", "text clamped");
    paragraph.append(...withEvidence(hit.text, asObject(hit.evidence)));
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

// The button is shown only where the text is cut off, which depends on the width.
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
  segment("rest", roundTrip - known); // the network, and time outside these stages
  add("rest", "客户端往返", roundTrip);
  timingsBox.replaceChildren(bar, list);
  if (cached) {
    const group = element("div");
    group.append(element("dt", "visually-hidden", "缓存"), element("dd", "cached", "缓存命中"));
    list.append(group);
  }
  timingsBox.hidden = false;
}
