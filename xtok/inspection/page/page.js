"use strict";
// Sorting, and the search of the map. Whatever comes from a vocabulary is set as text only.

const byId = (id) => document.getElementById(id);
const numbers = new Intl.NumberFormat("en-US");
const count = (n) => numbers.format(n);

function make(tag, about, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(about || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Tables

function sortBy(header) {
  const table = header.closest("table");
  const index = [...header.parentNode.children].indexOf(header);
  const body = table.tBodies[0];
  const cells = [...body.rows].map((row) => [row.cells[index], row]);
  const isNumber = cells.some(([cell]) => cell.dataset.v !== undefined);
  const before = header.getAttribute("aria-sort");
  const falls = before ? before === "ascending" : isNumber;
  for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", falls ? "descending" : "ascending");
  const value = (cell) => (isNumber ? Number(cell.dataset.v) : cell.textContent);
  const compare = isNumber ? (a, b) => a - b : (a, b) => a.localeCompare(b, "en", { numeric: true });
  cells.sort(([a], [b]) => (falls ? -1 : 1) * compare(value(a), value(b)));
  body.append(...cells.map(([, row]) => row));
}

for (const button of document.querySelectorAll("button.sort"))
  button.addEventListener("click", () => sortBy(button.closest("th")));

addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});

// The packed map: see search.py

async function unpacked([width, data]) {
  const deflated = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
  const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  if (width === 1) return planes;
  const values = new Uint32Array(planes.length / width);
  for (let plane = 0; plane < width; plane++)
    for (let i = 0, at = plane * values.length; i < values.length; i++, at++)
      values[i] |= planes[at] << (8 * plane);
  return values;
}

function boundsOf(sizes) {
  const bounds = new Uint32Array(sizes.length + 1);
  for (let i = 0; i < sizes.length; i++) bounds[i + 1] = bounds[i] + sizes[i];
  return bounds;
}

const TYPES = ["", "normal", "unknown", "control", "user defined", "unused", "byte"];
const NOT_TEXT = new Set([2, 3, 5]);
const SHOWN = 60;

class Side {
  // A vocabulary: `partner` is the other side's id of the same bytes, or -1.
  constructor(name, columns, partner, other) {
    Object.assign(this, { name, partner, other });
    this.types = columns[`${name}_types`];
    this.counts = columns[`${name}_counts`];
    this.bytes = columns[`${name}_bytes`];
    this.bounds = boundsOf(columns[`${name}_sizes`]);
    this.pieces = columns[`${name}_pieces`];
    this.pieceBounds = this.pieces && boundsOf(columns[`${name}_pieces_sizes`]);
  }

  get length() {
    return this.types.length;
  }

  content(id) {
    const own = this.bytes.subarray(this.bounds[id], this.bounds[id + 1]);
    if (own.length || !this.other || this.partner[id] < 0) return own;
    return this.other.content(this.partner[id]);
  }

  shown(id) {
    const bytes = this.content(id);
    if (!bytes.length) return this.types[id] === 5 ? "(unused)" : `#${id}`;
    const long = data.long[this.name === "student" ? 0 : 1][id];
    return escaped(bytes) + (long ? `… (${count(long)} bytes in all)` : "");
  }

  // One string of all tokens, a character per byte, with a separator that is not a byte.
  index() {
    let total = this.length + 1;
    for (let id = 0; id < this.length; id++) total += this.content(id).length;
    const units = new Uint16Array(total);
    this.starts = new Uint32Array(this.length + 1);
    let at = 0;
    for (let id = 0; id < this.length; id++) {
      units[at++] = 256;
      this.starts[id] = at;
      const bytes = this.content(id);
      units.set(bytes, at);
      at += bytes.length;
    }
    units[at] = 256;
    this.starts[this.length] = at + 1;
    this.text = new TextDecoder("utf-16le").decode(units);
  }

  // Ids of tokens that contain the bytes: equal ones first, then those that begin with them.
  find(needle) {
    const ranks = [[], [], [], [], []];
    let found = 0;
    let id = 0;
    for (let at = this.text.indexOf(needle); at >= 0; ) {
      id = this.idAt(at, id);
      const start = this.starts[id];
      const end = this.starts[id + 1] - 1;
      const before = at - start;
      const after = end - at - needle.length;
      const spaced = before === 1 && this.text[start] === " ";
      const rank = after ? (before ? (spaced ? 3 : 4) : 2) : before ? (spaced ? 1 : 4) : 0;
      if (ranks[rank].length < SHOWN) ranks[rank].push(id);
      found++;
      at = this.text.indexOf(needle, this.starts[id + 1]);
    }
    return { ids: ranks.flat().slice(0, SHOWN), found };
  }

  idAt(offset, from) {
    let step = 1;
    while (from + step < this.length && this.starts[from + step] <= offset) step *= 2;
    let low = from + (step >> 1);
    let high = Math.min(from + step, this.length);
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] <= offset) low = middle;
      else high = middle;
    }
    return low;
  }

  piecesOf(id) {
    return this.pieces && [...this.pieces.subarray(this.pieceBounds[id], this.pieceBounds[id + 1])];
  }
}

class Rows {
  // A map's entries by row, and their indices by column.
  constructor(columns, number, partner, width) {
    const own = columns[`own_${number}`];
    const ids = columns[`ids_${number}`];
    this.kinds = columns[`kinds_${number}`];
    this.slots = columns[`slots_${number}`];
    this.weights = columns[`weights_${number}`];
    this.bounds = boundsOf(columns[`sizes_${number}`]);
    this.rows = new Uint32Array(own.length);
    this.teachers = new Uint32Array(own.length);
    let listed = 0;
    for (let row = 0; row + 1 < this.bounds.length; row++)
      for (let at = this.bounds[row]; at < this.bounds[row + 1]; at++) {
        this.rows[at] = row;
        this.teachers[at] = own[at] ? partner[row] : ids[listed++];
      }
    const sizes = new Uint32Array(width);
    for (const id of this.teachers) sizes[id]++;
    this.columnBounds = boundsOf(sizes);
    this.byColumn = new Uint32Array(own.length);
    const next = this.columnBounds.slice();
    for (let at = 0; at < own.length; at++) this.byColumn[next[this.teachers[at]]++] = at;
  }

  weight(at) {
    const code = this.weights[at];
    return ((code % 900) + 100) / 10 ** (Math.floor(code / 900) + 2);
  }

  row(id) {
    const entries = [];
    for (let at = this.bounds[id]; at < this.bounds[id + 1]; at++)
      entries.push({ id: this.teachers[at], weight: this.weight(at), isSlot: this.slots[at] === 1 });
    return entries;
  }

  column(id) {
    const entries = [];
    for (let n = this.columnBounds[id]; n < this.columnBounds[id + 1]; n++) {
      const at = this.byColumn[n];
      entries.push({ id: this.rows[at], weight: this.weight(at), isSlot: this.slots[at] === 1 });
    }
    return entries.sort((a, b) => a.isSlot - b.isSlot || b.weight - a.weight || a.id - b.id);
  }
}

// Text from a vocabulary, as xtok prints it

const hidden = /[\p{C}\p{Z}\\]/u;
const short = { "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", " ": "␣" };
const encoder = new TextEncoder();
const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const hex = (byte) => byte.toString(16).padStart(2, "0");

function escaped(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; ) {
    const first = bytes[at];
    const size = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    const part = bytes.subarray(at, at + size);
    let char = null;
    try {
      char = decoder.decode(part);
    } catch {
      text += `\\x${hex(first)}`;
      at++;
      continue;
    }
    text += short[char] || (hidden.test(char) ? [...part].map((byte) => `\\x${hex(byte)}`).join("") : char);
    at += size;
  }
  return /^\p{M}/u.test(text) ? `◌${text}` : text;
}

const wanted = { n: 10, r: 13, t: 9, "\\": 92 };

function needleOf(query) {
  const units = [];
  for (const part of query.split(/(\\x[0-9a-fA-F]{2}|\\[nrt\\])/)) {
    if (/^\\x/.test(part) && part.length === 4) units.push(parseInt(part.slice(2), 16));
    else if (/^\\[nrt\\]$/.test(part)) units.push(wanted[part[1]]);
    else units.push(...encoder.encode(part.replaceAll("␣", " ")));
  }
  return String.fromCharCode(...units);
}

// The search

let data, student, teacher, maps;

async function load() {
  data = JSON.parse(byId("data").textContent);
  const columns = {};
  for (const [name, packed] of Object.entries(data.columns)) columns[name] = await unpacked(packed);
  const deltas = columns.partner;
  const partner = new Int32Array(deltas.length).fill(-1);
  const back = new Int32Array(columns.teacher_types.length).fill(-1);
  for (let id = 0, last = -1; id < deltas.length; id++) {
    if (!deltas[id]) continue;
    last += 1 + (deltas[id] % 2 ? (deltas[id] - 1) / 2 : -deltas[id] / 2);
    partner[id] = last;
    if (back[last] < 0) back[last] = id;
  }
  student = new Side("student", columns, partner, null);
  teacher = new Side("teacher", columns, back, student);
  student.index();
  teacher.index();
  maps = data.kinds.map((_, number) => new Rows(columns, number, partner, teacher.length));
}

const tokenButton = (side, id) => {
  const button = make("button", { type: "button", class: "tok" }, make("bdi", {}, side.shown(id)), make("span", { class: "id" }, `#${id}`));
  button.addEventListener("click", () => choose(side, id));
  return button;
};

function list(elementId, side, { ids, found }) {
  const items = ids.map((id) => make("li", {}, tokenButton(side, id)));
  if (found > ids.length) items.push(make("li", { class: "soft small" }, `and ${count(found - ids.length)} more`));
  if (!found) items.push(make("li", { class: "soft small" }, "none"));
  byId(elementId).replaceChildren(...items);
}

function search(query) {
  const started = performance.now();
  const byNumber = /^#(\d+)$/.exec(query);
  const empty = { ids: [], found: 0 };
  const results = [student, teacher].map((side) => {
    if (!query) return empty;
    const id = byNumber && Number(byNumber[1]);
    if (byNumber) return id < side.length ? { ids: [id], found: 1 } : empty;
    return side.find(needleOf(query));
  });
  list("students", student, results[0]);
  list("teachers", teacher, results[1]);
  const took = performance.now() - started;
  byId("found").dataset.ms = took.toFixed(1);
  byId("found").textContent = query ? `${count(results[0].found)} student and ${count(results[1].found)} teacher tokens` : "";
  if (results[0].ids.length) return detail(student, results[0].ids[0]);
  if (results[1].ids.length) return detail(teacher, results[1].ids[0]);
  byId("detail").replaceChildren();
}

function bar(weight, style) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of [["class", "measure"], ["width", "100%"], ["height", "6"], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
  const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of [["class", style], ["width", `${100 * weight}%`], ["height", "6"], ["rx", "2"]]) rect.setAttribute(name, value);
  svg.append(rect);
  return svg;
}

function weightText(weight) {
  return weight >= 0.001 ? weight.toFixed(weight >= 0.1 ? 3 : 4) : weight.toExponential(2);
}

function entriesTable(entries, side, title, style) {
  const table = make("table", { class: "entries" }, make("caption", {}, title));
  const head = make("tr", {}, ...["weight", "", "token"].map((label) => make("th", { scope: "col" }, label)));
  const body = make("tbody", {});
  for (const { id, weight, isSlot } of entries.slice(0, 40)) {
    const token = make("td", {}, tokenButton(side, id));
    if (isSlot) token.append(make("span", { class: "soft small" }, " scale slot"));
    body.append(make("tr", {}, make("td", { class: "n" }, weightText(weight)), make("td", { class: "picture" }, bar(weight, style)), token));
  }
  if (!entries.length) body.append(make("tr", {}, make("td", { colspan: 3, class: "soft" }, "nothing")));
  if (entries.length > 40) body.append(make("tr", {}, make("td", { colspan: 3, class: "soft" }, `and ${count(entries.length - 40)} more`)));
  table.append(make("thead", {}, head), body);
  return table;
}

function facts(side, id) {
  const bytes = side.content(id);
  const parts = [`${side.name} id ${id}`, TYPES[side.types[id]]];
  if (bytes.length && !NOT_TEXT.has(side.types[id])) parts.push(`bytes ${[...bytes.subarray(0, 24)].map(hex).join(" ")}${bytes.length > 24 ? " …" : ""}`);
  if (side.counts) parts.push(`${count(side.counts[id])} times in the text`);
  return make("p", { class: "soft" }, parts.join(" · "));
}

function pieces(side, id, other) {
  const found = side.piecesOf(id);
  const title = `${side === student ? "The teacher" : "The student"} spells it`;
  if (side.partner[id] >= 0) return [make("h4", {}, title), make("div", { class: "pieces-of" }, tokenButton(other, side.partner[id]), make("span", { class: "soft small" }, "the same bytes"))];
  if (!found || !found.length) return [];
  return [make("h4", {}, title), make("div", { class: "pieces-of" }, ...found.map((piece) => tokenButton(other, piece)))];
}

function half(side, id) {
  const isStudent = side === student;
  const other = isStudent ? teacher : student;
  const parts = [make("p", {}, make("span", { class: `side ${side.name}` }, side.name), " ", make("bdi", {}, data.sides[isStudent ? 0 : 1])), facts(side, id)];
  maps.forEach((rows, number) => {
    const name = maps.length > 1 ? `Map ${number + 1}: ` : "";
    const title = isStudent ? `${name}row, ${data.kinds[number][rows.kinds[id]]}` : `${name}column: the rows that lead to it`;
    parts.push(entriesTable(isStudent ? rows.row(id) : rows.column(id), other, title, `map${number + 1}`));
  });
  parts.push(...pieces(side, id, other));
  return make("div", {}, ...parts);
}

function detail(side, id) {
  const other = side === student ? teacher : student;
  const halves = [half(side, id)];
  if (side.partner[id] >= 0) halves.push(half(other, side.partner[id]));
  if (side === teacher) halves.reverse();
  byId("detail").replaceChildren(make("h3", { class: "tok" }, make("bdi", {}, side.shown(id))), make("div", { class: "halves" }, ...halves));
}

function choose(side, id) {
  detail(side, id);
  history.replaceState(null, "", `#${side.name}=${id}`);
  byId("detail").focus({ preventScroll: true });
  byId("detail").scrollIntoView({ block: "nearest" });
}

// #search=the, #student=679 and #teacher=17 are links into the map

function follow() {
  const match = /^#(search|student|teacher)=(.*)$/.exec(location.hash);
  if (!match) return;
  const [, what, value] = match;
  let words = value;
  try {
    words = decodeURIComponent(value);
  } catch {
    // a lone % is what was typed
  }
  const query = what === "search" ? words : `#${words}`;
  byId("query").value = query;
  search(query);
  const side = { student, teacher }[what];
  if (side && Number(words) < side.length) detail(side, Number(words));
  byId("search").scrollIntoView();
}

async function start() {
  const box = byId("query");
  if (!("DecompressionStream" in window)) {
    box.placeholder = "needs a browser of 2023 or later";
    return;
  }
  await load();
  box.disabled = false;
  box.placeholder = "201";
  box.addEventListener("input", () => {
    search(box.value);
    history.replaceState(null, "", box.value ? `#search=${encodeURIComponent(box.value)}` : "#search");
  });
  addEventListener("hashchange", follow);
  follow();
  document.documentElement.dataset.ready = "true";
}

start();
