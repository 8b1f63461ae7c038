// The page of a dynbus front end. Whatever comes from a model or the server is shown as text.
"use strict";

const KEY = "dynbus-api-key";
const LOOK_MS = 1000;
const POINTS = 60;
const COLOURS = 8;
const IDEAS = [
  "What is the capital of France?",
  "Explain what a cache is in two sentences.",
  "Write a haiku about trains.",
];

const $ = (id) => document.getElementById(id);

/** An element with a class, and text or children. */
function make(tag, className, ...content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content.filter((one) => one !== null && one !== undefined));
  return element;
}

// The server ---------------------------------------------------------------------------------

class Failure extends Error {}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function ask(path, options = {}) {
  const sent = { ...options, headers: { ...headers(), ...(options.headers || {}) } };
  // Not relative to the page's address, which may have a key in it.
  const url = new URL(path, location.origin + location.pathname);
  const response = await fetch(url, { ...sent, cache: "no-store", credentials: "same-origin" });
  if (response.status === 401) askForKey();
  if (!response.ok) throw new Failure(await reasonOf(response));
  return response;
}

async function reasonOf(response) {
  try {
    const body = await response.json();
    if (typeof body.error?.message === "string") return body.error.message;
  } catch {
    // It is no JSON: the status has to do.
  }
  return `the front end answered ${response.status} ${response.statusText}`;
}

function askForKey() {
  const dialog = $("key-dialog");
  if (dialog.open) return;
  $("key-error").textContent = sessionStorage.getItem(KEY) ? "The key is not known here." : "";
  dialog.showModal();
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  $("key-dialog").close();
  look();
});

/** The data of server-sent events, up to [DONE]. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const whole = rest.split(/\r?\n\r?\n/);
    rest = whole.pop();
    for (const event of whole) {
      const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

// Instances by name and colour ---------------------------------------------------------------

const known = new Map();

/** A, B, C and a colour for each instance, for as long as the page is open. */
function chip(id) {
  if (!known.has(id)) known.set(id, known.size);
  const number = known.get(id);
  const turn = Math.floor(number / 26);
  const letter = String.fromCharCode(65 + (number % 26)) + (turn || "");
  const made = make("span", `chip c${number % COLOURS}`, letter);
  made.title = `instance ${id}`;
  return made;
}

// Chat ---------------------------------------------------------------------------------------

let conversation = [];
let running = null;
const mine = new Map();

function addMessage(role, text) {
  $("welcome").hidden = true;
  const shown = make("div", "text");
  shown.textContent = text;
  const message = make("div", `message ${role}`, shown);
  $("messages").append(message);
  return { message, shown };
}

function isAtEnd() {
  const box = $("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}

function toEnd() {
  const box = $("messages");
  box.scrollTop = box.scrollHeight;
}

function request(messages) {
  const body = { model: $("model").value, messages, stream: true, stream_options: { include_usage: true } };
  const temperature = parseFloat($("temperature").value);
  const most = parseInt($("max-tokens").value, 10);
  if (!Number.isNaN(temperature)) body.temperature = temperature;
  if (most > 0) body.max_tokens = most;
  return body;
}

async function talk(question) {
  const system = $("system").value.trim();
  addMessage("user", question);
  conversation.push({ role: "user", content: question });
  const { message, shown } = addMessage("assistant", "");
  toEnd();
  const thought = make("div", "reasoning");
  const answer = { text: "", reasoning: "", began: performance.now(), first: null, tokens: 0, usage: null, id: "" };
  const messages = system ? [{ role: "system", content: system }, ...conversation] : conversation;
  running = new AbortController();
  busy(true, message);
  let painted = false;
  const paint = () => {
    painted = false;
    const follow = isAtEnd();
    if (answer.reasoning && !thought.isConnected) message.prepend(thought);
    thought.textContent = answer.reasoning.trim();
    // Some models begin with a blank.
    shown.textContent = answer.text.trimStart();
    if (follow) toEnd();
  };
  let failure = "";
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request(messages)),
      signal: running.signal,
    });
    answer.id = response.headers.get("X-Request-Id") || "";
    for await (const event of events(response.body)) {
      if (event.error) throw new Failure(event.error.message || "the answer ended with an error");
      if (event.usage) answer.usage = event.usage;
      const { content, reasoning_content: reasoning } = event.choices?.[0]?.delta ?? {};
      if (content || reasoning) {
        answer.first ??= performance.now();
        answer.tokens += 1;
        answer.text += content || "";
        answer.reasoning += reasoning || "";
        if (!painted) {
          painted = true;
          requestAnimationFrame(paint);
        }
      }
      if (event.choices?.[0]?.finish_reason === "length") answer.cut = true;
    }
  } catch (error) {
    if (running.signal.aborted) answer.stopped = true;
    else failure = error instanceof Failure ? error.message : `the connection broke: ${error.message}`;
  }
  paint();
  busy(false, message);
  running = null;
  // A question without any answer is asked again, not carried along.
  if (answer.text) conversation.push({ role: "assistant", content: answer.text });
  else conversation.pop();
  addFacts(message, answer);
  if (failure) message.append(make("p", "failure", failure));
  toEnd();
  look();
}

/** What is known of an answer; where it came from is added when the server tells. */
function addFacts(message, answer) {
  const facts = make("div", "facts");
  const where = make("span", "where");
  facts.append(where);
  const end = performance.now();
  if (answer.first !== null) {
    facts.append(make("span", "", `first token ${seconds((answer.first - answer.began) / 1000)}`));
    const tokens = answer.usage?.completion_tokens ?? answer.tokens;
    const rate = (tokens - 1) / ((end - answer.first) / 1000);
    if (tokens > 1) facts.append(make("span", "", `${tokens} tokens, ${rate.toFixed(rate < 10 ? 1 : 0)}/s`));
  }
  const cached = answer.usage?.prompt_tokens_details?.cached_tokens;
  if (cached !== undefined) {
    facts.append(make("span", "", `${cached} of ${answer.usage.prompt_tokens} prompt tokens cached`));
  }
  if (answer.stopped) facts.append(make("span", "", "stopped"));
  if (answer.cut) facts.append(make("span", "", "cut off at the longest answer"));
  message.append(facts);
  if (answer.id) mine.set(answer.id, where);
}

function busy(is, message) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  message.classList.toggle("busy", is);
  if (!is) $("question").focus({ preventScroll: true });
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || running || !$("model").value) return;
  $("question").value = "";
  fit();
  talk(question);
});

$("stop").addEventListener("click", () => running?.abort());

$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});

function fit() {
  const box = $("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}
$("question").addEventListener("input", fit);

$("new").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  mine.clear();
  for (const message of document.querySelectorAll(".message")) message.remove();
  $("welcome").hidden = false;
  $("question").focus();
});

for (const idea of IDEAS) {
  const button = make("button", "", idea);
  button.type = "button";
  button.addEventListener("click", () => {
    $("question").value = idea;
    $("composer").requestSubmit();
  });
  $("ideas").append(button);
}

// Views on a phone ---------------------------------------------------------------------------

for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.show;
    for (const one of document.querySelectorAll("nav button")) {
      one.setAttribute("aria-pressed", String(one === button));
    }
  });
}

// What the server tells ----------------------------------------------------------------------

const lines = { hit: [], running: [], transfers: [] };
let moved = null;
const open = new Set();
let looking = false;

async function look() {
  if (looking || $("key-dialog").open) return;
  looking = true;
  try {
    const response = await ask("page/state");
    show(await response.json());
    link("");
  } catch (error) {
    link(error instanceof Failure ? error.message : "the front end does not answer");
  } finally {
    looking = false;
  }
}

function link(problem) {
  const place = $("link");
  place.classList.toggle("bad", Boolean(problem));
  if (problem) place.textContent = problem;
}

function show(state) {
  for (const instance of state.instances) chip(instance.id);
  showModels(state);
  showInstances(state);
  showDecisions(state);
  showFigures(state);
  const count = state.instances.length;
  $("link").textContent = `${count} ${count === 1 ? "instance" : "instances"}`;
}

function showModels(state) {
  const select = $("model");
  const names = state.models.filter((model) => model.takes_chat).map((model) => model.name);
  const shown = [...select.options].map((option) => option.value).filter(Boolean);
  if (names.join("\n") !== shown.join("\n")) {
    const before = select.value;
    select.replaceChildren(
      ...(names.length ? names : [""]).map((name) => new Option(name || "no model yet", name)),
    );
    if (names.includes(before)) select.value = before;
    select.disabled = !names.length;
  }
  $("send").disabled = !names.length;
  const items = state.models.map((model) => {
    const count = state.instances.filter((one) => one.models.includes(model.name)).length;
    const facts = [
      `${count} ${count === 1 ? "instance" : "instances"}`,
      model.context_length ? `${model.context_length.toLocaleString("en")} tokens of context` : null,
      model.policy ? `KV routing (${model.policy})` : null,
    ];
    return make("li", "", make("b", "", model.name), make("span", "", facts.filter(Boolean).join(", ")));
  });
  $("models").replaceChildren(...(items.length ? items : [make("li", "nothing", "No model is served now.")]));
}

function showInstances(state) {
  const items = state.instances.map((one) => {
    const item = make("li", `instance${one.draining ? " draining" : ""}`);
    const busy = one.running === null ? "no answer" : `${one.running} running${one.waiting ? `, ${one.waiting} waiting` : ""}`;
    const work = one.role ? `${one.role}, ${busy}` : busy;
    const id = make("span", "id", one.id);
    id.title = `${one.component} ${one.id} at ${one.address || "an unknown address"}`;
    item.append(
      make("div", "top", chip(one.id), id, make("span", "what", one.draining ? `draining, ${work}` : work)),
    );
    if (one.cache?.total_blocks) item.append(...cacheOf(one.cache));
    if (one.transfers) item.append(transfersOf(one.transfers));
    for (const [name, text] of Object.entries(one.status)) {
      // Its figures are shown already.
      if (name === "disaggregated" && one.transfers) continue;
      item.append(make("div", "under", make("span", "", `${name}: ${text}`)));
    }
    return item;
  });
  $("instances").replaceChildren(...(items.length ? items : [make("li", "nothing", "None yet.")]));
}

/** How much of a cache running requests use, and what else it holds. */
function cacheOf(cache) {
  const { total_blocks: total, active_blocks: active, held_blocks: held } = cache;
  const used = make("i", "");
  used.style.width = `${Math.min(100, (100 * active) / total)}%`;
  const kept = make("i", "held");
  kept.style.width = `${Math.min(100, Math.max(0, (100 * ((held ?? 0) - active)) / total))}%`;
  const texts = [`${active.toLocaleString("en")} of ${total.toLocaleString("en")} blocks in use`];
  if (held !== null) texts.push(`${held.toLocaleString("en")} cached`);
  const under = make("div", "under", ...texts.map((text) => make("span", "", text)));
  if (cache.prefill_tokens) under.append(make("span", "", `${cache.prefill_tokens} tokens to prefill`));
  return [make("div", "bar", used, kept), under];
}

/** Where the prompts of an instance were computed, and what was moved for it. */
function transfersOf(one) {
  const prompts = [];
  if (one.prompts_handed_over) prompts.push(`${number(one.prompts_handed_over)} prompts handed over`);
  if (one.prompts_fell_back) prompts.push(`${number(one.prompts_fell_back)} fell back`);
  if (one.prompts_local) prompts.push(`${number(one.prompts_local)} computed here`);
  if (one.prompts_for_others) prompts.push(`${number(one.prompts_for_others)} computed for others`);
  const under = make("div", "under", make("span", "", prompts.join(", ") || "no prompts yet"));
  if (one.transferred_bytes) {
    const rate = one.transfer_seconds ? ` at ${gigabytes(one.transferred_bytes / one.transfer_seconds)}/s` : "";
    under.append(make("span", "", `${gigabytes(one.transferred_bytes)} read${rate}`));
  }
  if (one.blocks_quarantined) under.append(quarantine(one.blocks_quarantined));
  return under;
}

function quarantine(blocks) {
  return make("span", "bad", `${blocks.toLocaleString("en")} ${blocks === 1 ? "block" : "blocks"} in quarantine`);
}

/** How fast blocks move: those since the last look, or all where there are none. */
function showTransfers(state) {
  const told = state.instances.map((one) => one.transfers).filter(Boolean);
  $("transfers").hidden = !told.length;
  if (!told.length) return;
  const sum = (name) => told.reduce((all, one) => all + one[name], 0);
  const now = { bytes: sum("transferred_bytes"), seconds: sum("transfer_seconds") };
  const since = moved && now.seconds > moved.seconds && now.bytes >= moved.bytes ? moved : { bytes: 0, seconds: 0 };
  const rate = now.seconds > since.seconds ? (now.bytes - since.bytes) / (now.seconds - since.seconds) : 0;
  const isNew = !moved || now.bytes !== moved.bytes;
  moved = now;
  $("transfer-rate").textContent = now.bytes ? `${gigabytes(rate)}/s` : "–";
  const blocks = sum("blocks_quarantined");
  $("transfer-facts").replaceChildren(
    `${gigabytes(now.bytes)} of KV blocks read, `,
    blocks ? quarantine(blocks) : "0 blocks in quarantine",
  );
  draw($("transfer-line"), lines.transfers, isNew ? rate / 1e9 : 0, 0);
}

function showFigures(state) {
  showTransfers(state);
  const rate = state.hit_rate;
  const count = state.instances.reduce((sum, one) => sum + (one.running || 0), 0);
  $("hit-rate").textContent = rate === null ? "–" : `${Math.round(100 * rate)} %`;
  $("running").textContent = String(count);
  draw($("hit-line"), lines.hit, rate ?? 0, 1);
  draw($("running-line"), lines.running, count, 0);
}

function draw(svg, values, value, most) {
  values.push(value);
  if (values.length > POINTS) values.shift();
  const top = most || Math.max(4, ...values);
  const at = (one, index) => `${((index * 120) / (POINTS - 1)).toFixed(1)},${(30 - (28 * one) / top).toFixed(1)}`;
  let line = svg.firstElementChild;
  if (!line) {
    line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    svg.append(line);
  }
  const from = POINTS - values.length;
  line.setAttribute("points", values.map((one, index) => at(one, from + index)).join(" "));
}

// Decisions ----------------------------------------------------------------------------------

function showDecisions(state) {
  const all = state.routing.flatMap((one) => one.latest);
  all.sort((one, other) => one.ago_s - other.ago_s);
  const items = all.slice(0, 30).map(shownDecision);
  const nothing = state.routing.length
    ? "No request yet."
    : "Requests go by load here: no model's instances tell what they cache.";
  $("decisions").replaceChildren(...(items.length ? items : [make("li", "nothing", nothing)]));
  for (const one of all) {
    const where = mine.get(one.request_id);
    if (where && !where.hasChildNodes()) where.append("from ", chip(one.chosen.instance));
  }
}

const made = new Map();

/** The element of a decision, the same one for as long as nothing of it has changed. */
function shownDecision(one) {
  const name = `${one.request_id}/${one.attempt}/${one.number}`;
  const text = JSON.stringify({ ...one, ago_s: 0 }) + mine.has(one.request_id);
  let item = made.get(name);
  if (item?.text !== text) {
    item = { text, element: decisionOf(one, name) };
    made.set(name, item);
    if (made.size > 200) made.delete(made.keys().next().value);
  }
  item.element.querySelector(".ago").textContent = ago(one.ago_s);
  return item.element;
}

function decisionOf(one, name) {
  const id = make("span", "id", one.request_id);
  id.title = `request ${one.request_id}`;
  const reused = one.reused_tokens ?? one.expected_reuse;
  const part = make("i", "");
  part.style.width = `${one.prompt_tokens ? (100 * reused) / one.prompt_tokens : 0}%`;
  const bar = make("div", "bar", part);
  const cached = `${reused} of ${one.prompt_tokens} prompt tokens ${one.reused_tokens === null ? "expected in its cache" : "from its cache"}`;
  const under = make("div", "under", make("span", "", cached), outcomeOf(one));
  const summary = make(
    "summary",
    "",
    make("div", "top", chip(one.chosen.instance), id, make("span", "ago")),
    make("div", "why", whyOf(one)),
    bar,
    under,
  );
  const details = make("details", `decision${mine.has(one.request_id) ? " mine" : ""}`, summary);
  details.append(make("div", "details", candidatesOf(one)));
  details.open = open.has(name);
  details.addEventListener("toggle", () => (details.open ? open.add(name) : open.delete(name)));
  return make("li", "", details);
}

function outcomeOf(one) {
  if (one.error) return make("span", "bad", `ended with ${one.error}`);
  if (one.first_item_s === null) return make("span", "", one.ended_s === null ? "no token yet" : "no token");
  const first = `first token ${seconds(one.first_item_s)}`;
  return make("span", "", one.ended_s === null ? `${first}, running` : `${first}, done ${seconds(one.ended_s)}`);
}

/** Why a request went where it went, as a sentence. */
function whyOf(one) {
  const count = one.candidates.length + one.more_candidates;
  const again = one.attempt > 1 ? `Attempt ${one.attempt}. ` : "";
  const waited = one.waited_s >= 0.001 ? ` It waited ${seconds(one.waited_s)} in the queue.` : "";
  const chosen = one.candidates.find((each) => isChosen(one, each));
  const others = one.candidates.filter((each) => !isChosen(one, each));
  const best = Math.max(0, ...others.map((each) => each.held_tokens));
  let why;
  if (one.reason === "only_candidate") why = "It was the only instance that could take it.";
  else if (one.reason === "session") why = "Its session was there before.";
  else if (one.reason === "sampled") why = `It was drawn among ${count} by their costs.`;
  else if (!chosen) why = `It had the lowest cost of ${count}.`;
  else if (chosen.held_tokens > best) why = "It holds the most of the prompt, and costs least.";
  else if (chosen.held_tokens < best) why = "Another one holds more of the prompt, but is busier.";
  else if (best) why = "Others hold as much of the prompt, but are busier.";
  else why = "Nobody holds any of the prompt; by load it costs least.";
  return again + why + waited;
}

function isChosen(one, candidate) {
  return candidate.instance === one.chosen.instance && candidate.dp_rank === one.chosen.dp_rank;
}

function candidatesOf(one) {
  const head = make("tr", "", ...["", "cost", "held", "to prefill", "blocks in use"].map((text) => make("th", "", text)));
  const rows = one.candidates.map((each) => {
    const rank = each.dp_rank ? ` rank ${each.dp_rank}` : "";
    const cells = [
      make("td", "", chip(each.instance), rank),
      make("td", "", each.cost === null ? "never" : number(each.cost)),
      make("td", "", `${each.held_tokens}`),
      make("td", "", `${each.prefill_tokens}`),
      make("td", "", number(each.active_blocks)),
    ];
    return make("tr", isChosen(one, each) ? "chosen" : "", ...cells);
  });
  const table = make("table", "", make("thead", "", head), make("tbody", "", ...rows));
  const more = [];
  if (one.more_candidates) more.push(`${one.more_candidates} more`);
  if (one.excluded) more.push(`${one.excluded} left out`);
  more.push(`policy ${one.policy}`);
  return make("div", "", table, make("div", "under", make("span", "", more.join(", "))));
}

// Numbers ------------------------------------------------------------------------------------

function number(value) {
  return value >= 100 ? value.toFixed(0) : Number(value.toPrecision(3)).toString();
}

function gigabytes(bytes) {
  return bytes < 1e8 ? `${number(bytes / 1e6)} MB` : `${number(bytes / 1e9)} GB`;
}

function seconds(value) {
  if (value < 0.0095) return `${(1000 * value).toFixed(1)} ms`;
  return value < 0.95 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`;
}

function ago(value) {
  if (value < 60) return `${Math.round(value)} s ago`;
  return value < 3600 ? `${Math.round(value / 60)} min ago` : `${Math.round(value / 3600)} h ago`;
}

// Begin --------------------------------------------------------------------------------------

setInterval(() => {
  if (!document.hidden) look();
}, LOOK_MS);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) look();
});
look();
