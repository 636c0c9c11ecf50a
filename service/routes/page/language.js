// The words of the page in Chinese and English. Documents and questions stay in their language.

import { byId, isNumber, preference, prefer } from "./dom.js";

const NAME = "care.language";
export const CHINESE = "zh-CN";
const ENGLISH = "en";

const plural = (count, one, many) => `${count} ${count === 1 ? one : many}`;

// Each entry: Chinese, English. A function gets the values of the sentence.
const WORDS = {
  "page.title": ["医学文本检索", "Medical text search"],
  "page.lead": [
    "用平常的话描述问题，按意思查找相近的医学资料。",
    "Ask in everyday words, best in Chinese; passages are found by their meaning.",
  ],
  "page.skip": ["跳到检索结果", "Skip to the results"],
  "page.disclaimer": [
    "检索结果仅供参考，不能代替医生诊断。",
    "Results are for reference only and do not replace a doctor's diagnosis.",
  ],
  "page.documentation": ["接口文档", "API documentation"],
  "page.keys": [
    "快捷键：/ 回到问题，j 和 k 选择上一条或下一条结果，Enter 查看全文。",
    "Keys: / goes to the question, j and k to the next and previous result, Enter opens it.",
  ],
  close: ["关闭", "Close"],

  "query.label": ["想查询的问题", "Your question"],
  "query.placeholder": ["例如：高血压饮食", "For example: 高血压饮食"],
  "query.submit": ["检索", "Search"],
  "query.clear": ["清除问题和结果", "Clear the question and the results"],
  "query.empty": ["请先输入想查询的问题。", "Please enter a question first."],
  "query.left": [
    ({ left }) => (left < 0 ? `超出 ${-left} 个字` : `还可以输入 ${left} 个字`),
    ({ left }) =>
      left < 0
        ? `${plural(-left, "character", "characters")} too long`
        : `${plural(left, "character", "characters")} left`,
  ],
  examples: ["可以这样问", "Try asking"],

  "filters.open": [
    ({ count }) => (count ? `筛选（${count}）` : "筛选"),
    ({ count }) => (count ? `Filters (${count})` : "Filters"),
  ],
  "filters.label": ["筛选", "Filters"],
  "filters.clear": ["清除筛选", "Clear filters"],
  "filters.find": ["查找选项", "Find a value"],
  "filters.from": ["从", "From"],
  "filters.to": ["到", "To"],
  "filters.show": ["显示结果", "Show results"],
  "filters.only": ["仅限", "Only"],
  yes: ["是", "Yes"],
  no: ["否", "No"],

  "field.department": ["科室", "Department"],
  "field.topic": ["主题", "Topic"],
  "field.year": ["年份", "Year"],
  "field.date": ["日期", "Date"],
  "field.page": ["页码", "Page"],
  "field.source": ["来源", "Source"],
  "field.type": ["类型", "Type"],
  "field.language": ["语言", "Language"],
  "field.hospital": ["医院", "Hospital"],
  "field.author": ["作者", "Author"],
  "field.tags": ["标签", "Tags"],

  developer: ["开发者信息", "Developer details"],
  "mode.label": ["查找方式", "Mode"],
  "mode.hybrid": ["意思和字词", "Meaning and words"],
  "mode.dense": ["意思", "Meaning"],
  "mode.lexical": ["字词", "Words"],
  "mode.compare": ["对比", "Compare with"],
  "mode.alone": ["不对比", "Nothing"],
  "mode.rerank": ["重新排序", "Rank again"],

  "results.label": ["检索结果", "Results"],
  "results.loading": ["正在检索…", "Searching…"],
  "results.found": [
    ({ count }) => `找到 ${count} 条`,
    ({ count }) => plural(count, "result", "results"),
  ],
  "results.none": ["没有符合条件的结果", "No results"],
  "results.unanswered": [
    ({ count }) => `资料中似乎没有这个问题的答案，以下 ${count} 条只是内容相近`,
    ({ count }) =>
      `Nothing here seems to answer the question; ${plural(count, "passage is", "passages are")} merely related`,
  ],
  "results.unanswered.short": ["似乎没有答案", "seems unanswered"],
  "results.failed": ["没有完成", "failed"],
  "results.common": [({ count }) => `两边都有 ${count} 条`, ({ count }) => `${count} in both`],
  "results.named": [
    ({ name, outcome }) => `「${name}」${outcome}`,
    ({ name, outcome }) => `${name}: ${outcome}`,
  ],
  "results.partly": ["（部分查找方式没有完成）", " (a part of the search failed)"],
  "results.kept": [
    "（重新排序没有完成，保持原来的顺序）",
    " (not ranked again, because ranking failed)",
  ],
  "results.spent": [({ time }) => `，用时 ${time} 毫秒`, ({ time }) => `, ${time} ms`],
  "results.cached": ["（来自缓存）", " (from a cache)"],
  "results.comma": ["，", ", "],
  "results.stop": ["。", "."],
  "results.legend": [
    "底色标出与问题相同的字词；下划线标出很可能回答问题的句子，它不一定就是答案。",
    "Words of your question are marked. An underlined sentence probably answers it; it need not be the answer.",
  ],
  "results.more": ["更多结果", "More results"],

  "advice.words": [
    "换一种说法，或只写最重要的词，例如病名、药名、症状。",
    "Use other words, or only the main ones: a disease, a drug, a symptom.",
  ],
  "advice.chinese": [
    "资料多为中文，请用中文提问。",
    "The documents are mostly Chinese: ask in Chinese.",
  ],
  "advice.filters": ["去掉筛选条件后再试。", "Search without the filters."],
  "advice.mode": ["也按意思查找。", "Search by meaning too."],
  "advice.elsewhere": [
    "这里只有本索引中的资料；与健康有关的急事请直接就医。",
    "Only this collection is searched. If it is urgent, see a doctor.",
  ],

  "hit.number": [({ rank }) => `第 ${rank} 条`, ({ rank }) => `Result ${rank}`],
  "hit.open": ["查看全文", "Open document"],
  "hit.source": [({ host }) => `来源网页 ${host}`, ({ host }) => `Source: ${host}`],
  "hit.tab": ["（在新标签页中打开）", "(opens in a new tab)"],
  "hit.unfold": ["展开", "Show all"],
  "hit.fold": ["收起", "Show less"],
  "hit.cite": ["复制引用", "Copy citation"],
  "hit.cited": ["引用已复制。", "Citation copied."],
  "hit.score": ["得分", "Score"],
  "hit.page": [({ page }) => `第 ${page} 页`, ({ page }) => `p. ${page}`],
  "hit.chunk": [
    ({ number, count }) => `第 ${number} 段，共 ${count} 段`,
    ({ number, count }) => `passage ${number} of ${count}`,
  ],
  "hit.place": [
    ({ name, place }) => `「${name}」${place ? `第 ${place}` : "未出现"}`,
    ({ name, place }) => `${name}: ${place ? `rank ${place}` : "not found"}`,
  ],
  "hit.untitled": ["（无标题）", "(untitled)"],
  "hit.citation.id": [
    ({ id, index }) => `编号 ${id}，索引 ${index}`,
    ({ id, index }) => `id ${id}, index ${index}`,
  ],
  "label.colon": ["：", ": "],

  "copy.failed": ["无法自动复制，请手动复制：", "Copy it by hand:"],
  "link.copy": ["复制链接", "Copy link"],
  "link.hint": [
    "链接中含有所查询的问题，请只发给可以看到它的人。",
    "The link contains your question: send it only to people who may read it.",
  ],
  "link.copied": ["链接已复制。", "Link copied."],

  "stage.queue": ["排队", "queue"],
  "stage.encode": ["编码", "encode"],
  "stage.search": ["检索", "search"],
  "stage.fetch": ["取文", "fetch"],
  "stage.total": ["总计", "total"],
  "stage.rest": ["客户端往返", "round trip"],
  "stage.cached": ["缓存命中", "cached"],
  "stage.cache": ["缓存", "cache"],
  "stage.ms": [({ time }) => `${time} 毫秒`, ({ time }) => `${time} ms`],

  "document.loading": ["正在读取文档…", "Reading the document…"],
  "document.all": [
    ({ count }) => `显示全部 ${count} 段`,
    ({ count }) => `Show all ${count} passages`,
  ],
  "document.metadata": ["元数据", "Metadata"],
  "document.here": ["检索到的一段", "The passage that was found"],
  "document.label": ["文档", "Document"],

  "answer.ask": ["写出回答", "Write an answer"],
  "answer.note": [
    ({ server }) => `问题和前几段资料会发送到 ${server}，由语言模型写出回答，可能有错。`,
    ({ server }) =>
      `The question and the first passages are sent to ${server}, whose language model writes; it can be wrong.`,
  ],
  "answer.writing": ["正在写…", "Writing…"],
  "answer.done": [
    ({ count }) => (count ? `有 ${count} 句没有资料依据，未显示。` : ""),
    ({ count }) => (count ? `Left out without support: ${count}.` : ""),
  ],
  "answer.citation": [
    ({ number, title }) => `资料 ${number}：${title}`,
    ({ number, title }) => `Source ${number}: ${title}`,
  ],
  "answer.no_hits": ["没有可以依据的资料，不写回答。", "There is no passage to answer from."],
  "answer.unanswered": [
    "资料中似乎没有这个问题的答案，不写回答。",
    "Nothing here seems to answer the question, so no answer is written.",
  ],
  "answer.not_cited": [
    "写出的内容没有资料依据，不显示。",
    "What was written is not supported by the passages, and is not shown.",
  ],
  "answer.failed": ["回答中断，请稍后再试。", "The answer was broken off: try again later."],

  "index.name": ["索引", "index"],
  "index.choose": ["索引", "Index"],
  "index.version": ["版本", "version"],
  "index.count": ["条目", "entries"],
  "index.pair": ["编码器", "encoder"],
  "index.unknown": ["暂时无法读取索引信息。", "The index cannot be read at the moment."],
  "index.open": ["索引详情", "Index details"],
  "index.state": ["状态", "state"],
  "index.active": ["使用中的版本", "the active version"],
  "index.inactive": ["不是使用中的版本（无法载入）", "not the active version, which cannot be loaded"],
  "index.documents": ["文档", "documents"],
  "index.created": ["建立时间", "built"],
  "index.dimension": ["向量维数", "dimensions"],
  "index.space": ["向量空间", "embedding space"],
  "index.factory": ["索引类型", "index type"],
  "index.modes": ["查找方式", "modes"],
  "index.reranker": ["重新排序", "reranker"],
  "index.fields": ["筛选字段", "filter fields"],
  "index.thresholds": ["有无答案的阈值", "thresholds of answerable"],
  "index.versions": ["查看各个版本", "List the versions"],
  "documents.show": ["查看文档", "List the documents"],
  "documents.id": ["文档编号", "Document id"],
  "documents.open": ["打开", "Open"],
  "documents.range": [
    ({ from, to, total }) => `第 ${from}–${to} 篇，共 ${total} 篇`,
    ({ from, to, total }) => `${from}–${to} of ${total}`,
  ],
  "documents.none": ["没有更多文档。", "There are no more documents."],
  "documents.chunks": [({ count }) => `${count} 段`, ({ count }) => plural(count, "passage", "passages")],
  "documents.before": ["上一页", "Previous page"],
  "documents.after": ["下一页", "Next page"],
  "index.reload": ["载入使用中的版本", "Load the active version"],
  "index.reloaded": ["已载入。", "Loaded."],

  "key.label": ["访问密钥", "API key"],
  "key.use": ["使用此密钥", "Use this key"],
  retry: ["重试", "Try again"],
  "problem.request": [({ id }) => `请求编号：${id}`, ({ id }) => `Request: ${id}`],
  "problem.limit": [
    ({ field, limit, unit }) => `${field}：不能超过 ${limit}${unit ? " 个字" : ""}。`,
    ({ field, limit, unit }) => `${field}: at most ${limit}${unit ? " characters" : ""}.`,
  ],
  "problem.line": [({ field, text }) => `${field}：${text}`, ({ field, text }) => `${field}: ${text}`],
  "problem.invalid": ["内容不符合要求。", "is not valid."],
  "problem.wait": [({ wait }) => `建议等待 ${wait} 秒后重试。`, ({ wait }) => `Try again in ${wait} s.`],
  "problem.status": [
    ({ status, code }) => `状态码 ${status}${code ? `，错误代码 ${code}` : ""}`,
    ({ status, code }) => `Status ${status}${code ? `, code ${code}` : ""}`,
  ],
  "problem.offline": ["无法连接到服务。", "The service cannot be reached."],
  "problem.offline.hint": [
    "请检查网络连接，或确认服务正在运行，然后再试。",
    "Check the network, or whether the service runs, and try again.",
  ],
  "problem.timeout": ["等待服务回应超时。", "The service has not answered in time."],
  "problem.timeout.hint": ["服务可能正忙，请稍后再试。", "It may be busy: try again later."],
  "problem.unreadable": [
    "服务的回应无法识别，请稍后再试。",
    "The answer of the service cannot be read: try again later.",
  ],
  "problem.other": ["检索没有成功。", "The search failed."],
  "problem.field.query": ["问题", "Question"],
  "problem.field.filter": ["筛选条件", "Filters"],
  "problem.field.top_k": ["结果条数", "Number of results"],

  "error.invalid_json": ["请求的格式不正确，请刷新页面后再试。", "The request is malformed: reload the page."],
  "error.invalid_request": [
    "这次检索的内容不符合要求，请修改后再试。",
    "The search is not valid: change it and try again.",
  ],
  "error.unauthorized": [
    "没有使用此服务的权限：缺少访问密钥，或密钥不正确。",
    "No access: the API key is missing or wrong.",
  ],
  "error.forbidden": [
    "没有使用此服务的权限：此密钥不能用于这项操作。",
    "No access: this API key may not be used for this.",
  ],
  "error.no_admin_key": [
    "这项操作需要管理密钥，而此服务没有设置。",
    "This needs a key of an administrator, and none is configured.",
  ],
  "error.needs_key": [
    "此服务没有设置密钥，这项操作只能在服务所在的机器上进行。",
    "Without keys, this is open to the machine of the service alone.",
  ],
  "error.not_found": ["没有找到所请求的接口，请检查访问地址。", "Not found: check the address."],
  "error.unknown_document": [
    "索引中没有这个文档：编号不对，或索引已更新。",
    "The index has no such document: the id is wrong, or the index has changed.",
  ],
  "error.method_not_allowed": [
    "请求的方式不正确，请刷新页面后再试。",
    "The request is malformed: reload the page.",
  ],
  "error.body_too_long": ["输入的内容太长，请缩短后再试。", "The text is too long: shorten it."],
  "error.unsupported_media_type": [
    "请求的格式不正确，请刷新页面后再试。",
    "The request is malformed: reload the page.",
  ],
  "error.empty_text": ["请输入想查询的问题。", "Please enter a question."],
  "error.text_too_long": ["问题太长，请缩短后再试。", "The question is too long: shorten it."],
  "error.top_k_too_large": ["要求的结果条数太多。", "These are more results than allowed."],
  "error.filter_too_large": [
    "筛选条件太多，请减少后再试。",
    "There are too many filters: remove some.",
  ],
  "error.invalid_filter": ["筛选条件不正确，请修改后再试。", "A filter is not valid: change it."],
  "error.filter_not_numeric": [
    "索引已更新，所选的范围不再适用，请清除筛选后再试。",
    "The index has changed, and a range no longer applies: clear the filters.",
  ],
  "error.unknown_filter_field": [
    "索引已更新，其中没有所选的筛选条件，请清除后再试。",
    "The index has changed and lacks a filter: clear the filters.",
  ],
  "error.mode_not_available": [
    "索引已更新，其中没有所选的查找方式，请刷新页面后再试。",
    "The index has changed and lacks the mode: reload the page.",
  ],
  "error.rerank_not_available": [
    "索引已更新，其中的结果不能重新排序，请取消后再试。",
    "The index has changed, and its results cannot be ranked again: turn that off.",
  ],
  "error.rerank_too_large": [
    "要重新排序的结果太多，请取消后再试。",
    "There are too many results to rank again: turn that off.",
  ],
  "error.overloaded": ["服务繁忙，请稍后再试。", "The service is busy: try again later."],
  "error.rate_limited": ["请求太频繁，请稍后再试。", "Too many requests: try again later."],
  "error.too_many_requests": ["服务繁忙，请稍后再试。", "The service is busy: try again later."],
  "error.shutting_down": ["服务正在停止，请稍后再试。", "The service is stopping: try again later."],
  "error.unavailable": [
    "服务所依赖的数据库没有回应，请稍后再试。",
    "A database of the service does not answer: try again later.",
  ],
  "error.deadline_exceeded": [
    "服务处理超时，请稍后再试。",
    "The service took too long: try again later.",
  ],
  "error.internal_error": ["服务出现错误，请稍后再试。", "The service failed: try again later."],
  "error.bad_gateway": ["无法连接到服务，请稍后再试。", "The service cannot be reached: try again later."],
  "error.service_unavailable": [
    "服务暂时不可用，请稍后再试。",
    "The service is unavailable: try again later.",
  ],
};

const changed = [];
let language = CHINESE;

export const isEnglish = () => language === ENGLISH;
export const hasWords = (key) => Object.hasOwn(WORDS, key);

// Returns words in the language of the page.
export function t(key, values = {}) {
  const words = WORDS[key][isEnglish() ? 1 : 0];
  return typeof words === "function" ? words(values) : words;
}

// Returns a number as readers of the language write it; "" for anything else.
export const grouped = (value) =>
  isNumber(value) ? value.toLocaleString(isEnglish() ? ENGLISH : CHINESE) : "";

// Calls `handler` after each change of the language.
export function onLanguageChanged(handler) {
  changed.push(handler);
}

function show(chosen) {
  language = chosen;
  document.documentElement.lang = chosen;
  document.title = t("page.title");
  for (const node of document.querySelectorAll("[data-text]")) {
    node.textContent = t(node.dataset.text);
  }
  for (const node of document.querySelectorAll("[data-label]")) {
    node.setAttribute("aria-label", t(node.dataset.label));
  }
  for (const node of document.querySelectorAll("[data-placeholder]")) {
    node.setAttribute("placeholder", t(node.dataset.placeholder));
  }
  const other = isEnglish() ? CHINESE : ENGLISH;
  const switcher = byId("language");
  switcher.textContent = isEnglish() ? "中文" : "English";
  switcher.lang = other;
  for (const handler of changed) handler();
}

// Shows the page in the language that the reader has chosen on this device, else the browser's.
export function startLanguage() {
  const preferred = preference(NAME) ?? navigator.language;
  byId("language").addEventListener("click", () => {
    const other = isEnglish() ? CHINESE : ENGLISH;
    prefer(NAME, other);
    show(other);
  });
  show(/^zh\b/i.test(preferred) ? CHINESE : ENGLISH);
}
