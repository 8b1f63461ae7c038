// Pictures of numbers: elements, lanes of a time line, and the life of a request. Text is only ever
// text: nothing here makes markup of it.

const SVG = "http://www.w3.org/2000/svg";

export function make(name, classes = "", ...children) {
  const element = document.createElement(name);
  if (classes) element.className = classes;
  element.append(...children.filter((each) => each !== null && each !== undefined));
  return element;
}

function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

// Numbers ------------------------------------------------------------------------------------

export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  // What three digits round up to the next unit is of that.
  if (size >= 999.5e6) return `${(value / 1e9).toPrecision(3)}G`;
  if (size >= 999.5e3) return `${(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(2)).toString();
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${Number((1000 * value).toPrecision(2))} ms`;
  if (value < 0.9995) return `${Math.round(1000 * value)} ms`;
  if (value < 99.5) return `${Number(value.toPrecision(3))} s`;
  const whole = Math.round(value);
  if (whole < 7200) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Number((value / 3600).toPrecision(3))} h`;
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(value > 0.0995 || value === 0 ? 0 : 1)} %`;
}

export function clock(unix, withSeconds = true) {
  const options = { hour: "2-digit", minute: "2-digit", hour12: false };
  if (withSeconds) options.second = "2-digit";
  return new Date(1000 * unix).toLocaleTimeString("en-GB", options);
}

export function moment(unix, span) {
  const day = new Date(1000 * unix).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  return span > 80000 ? `${day} ${clock(unix, false)}` : clock(unix, span < 7200);
}

/** From when to when, with the day once where it is the same. */
export function period(since, until) {
  const [first, last] = [moment(since, 1e6), moment(until, 1e6)];
  const isOneDay = first.slice(0, -5) === last.slice(0, -5);
  return `${first} to ${isOneDay ? clock(until, false) : last}`;
}

// Lanes --------------------------------------------------------------------------------------

const HIGH = 100;

/** The largest value of a lane, rounded up to one that is easily said. */
export function niceTop(values, least) {
  const top = Math.max(least, ...values.map((each) => each ?? 0));
  const power = 10 ** Math.floor(Math.log10(top));
  const factor = [1, 1.5, 2, 3, 4, 5, 7.5, 10].find((each) => each * power >= top * 0.9999) ?? 10;
  return factor * power;
}

/** An SVG of series of values, one for each bucket. */
export function lane(series, count, top) {
  const svg = shape("svg", { viewBox: `0 0 ${count} ${HIGH}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(shape("line", { class: "grid", x1: 0, x2: count, y1: HIGH / 2, y2: HIGH / 2 }));
  const y = (value) => (HIGH - 2 - (HIGH - 8) * Math.min(1, value / top)).toFixed(1);
  let below = new Array(count).fill(0);
  for (const { values, kind, colour } of series) {
    if (kind === "bar" || kind === "open-bar") {
      let path = "";
      for (let at = 0; at < count; at += 1) {
        const value = values[at] ?? 0;
        if (value <= 0) continue;
        path += `M${at + 0.12} ${y(below[at])}V${y(below[at] + value)}H${at + 0.88}V${y(below[at])}Z`;
        below[at] += value;
      }
      svg.append(shape("path", { d: path, class: `${kind === "bar" ? "solid" : "open"} ${colour}` }));
      continue;
    }
    let line = "";
    let area = "";
    let since = -1;
    for (let at = 0; at <= count; at += 1) {
      const value = at < count ? values[at] : null;
      if (value === null || value === undefined) {
        if (since >= 0) area += `V${HIGH}H${since}Z`;
        since = -1;
        continue;
      }
      // A step for each bucket: nothing is known between them.
      if (since < 0) {
        line += `M${at} ${y(value)}`;
        area += `M${at} ${HIGH}V${y(value)}`;
        since = at;
      }
      line += `V${y(value)}H${at + 1}`;
      area += `V${y(value)}H${at + 1}`;
    }
    if (kind === "area") svg.append(shape("path", { d: area, class: `area ${colour}` }));
    svg.append(shape("path", { d: line, class: `line ${kind === "dashed" ? "dashed" : ""} ${colour}` }));
  }
  return svg;
}

/** An SVG with a row of cells for each place: the darker, the more. */
export function heat(rows, count) {
  const svg = shape("svg", { viewBox: `0 0 ${count} ${rows.length * 10}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const top = Math.max(1e-9, ...rows.flat());
  rows.forEach((values, row) => {
    svg.append(shape("line", { class: "grid", x1: 0, x2: count, y1: row * 10 + 5, y2: row * 10 + 5 }));
    values.forEach((value, at) => {
      if (value <= 0) return;
      const opacity = (0.15 + 0.85 * (value / top)).toFixed(2);
      svg.append(shape("rect", { x: at, y: row * 10 + 0.8, width: 1.02, height: 8.4, opacity, class: "solid blue" }));
    });
  });
  return svg;
}

const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

/** An axis of time with ticks at round times, as many as have room, and none closer than `finest`;
 * `text` says what each is called, and `offset` is what times are behind those that are round for
 * people. */
export function axis(since, until, room, text, { offset = 0, finest = 0 } = {}) {
  const element = make("div", "axis");
  const least = Math.max(finest, (until - since) / Math.max(2, Math.floor(room / 100)));
  const power = 10 ** Math.floor(Math.log10(least));
  const step = least < 1
    ? power * ([1, 2, 5, 10].find((each) => each * power >= least) ?? 10)
    : STEPS.find((each) => each >= least) ?? 86400 * Math.ceil(least / 86400);
  for (let at = Math.ceil((since - offset) / step - 1e-6) * step + offset; at <= until; at += step) {
    const share = (at - since) / (until - since);
    const tick = make("span", share < 0.03 ? "first" : share > 0.96 ? "last" : "", text(at));
    tick.style.left = `${Math.min(100, Math.max(0, 100 * share))}%`;
    element.append(tick);
  }
  return element;
}

// One request --------------------------------------------------------------------------------

const KINDS = {
  prepare: "prepared",
  queue: "waits, or on its way",
  transfer: "blocks of its prompt come",
  prefill: "prompt, until the first token",
  output: "output",
  end: "ended without an output",
};

/** A request's life: a row for the front end and for each attempt, on one axis. */
export function gantt(life) {
  const box = make("div", "gantt");
  const used = new Set();
  for (const row of life.rows) {
    const track = make("div", "track");
    for (const bar of row.bars) {
      const length = bar.to - bar.from;
      if (length <= 0) continue;
      used.add(bar.kind);
      const share = (100 * length) / life.length;
      const piece = make("div", `bar k-${bar.kind}`, share > 9 ? seconds(length) : "");
      piece.style.left = `${Math.min(99.7, (100 * bar.from) / life.length)}%`;
      piece.style.width = `${share}%`;
      piece.title = `${KINDS[bar.kind]}: ${seconds(length)}`;
      track.append(piece);
    }
    const note = make("span", "note", row.note, row.note && row.error ? ", " : "", make("span", "error", row.error));
    const label = make("div", "label", make("span", "", row.label), note);
    const said = row.bars.filter((bar) => bar.to > bar.from).map((bar) => `${KINDS[bar.kind]} ${seconds(bar.to - bar.from)}`);
    track.setAttribute("role", "img");
    track.setAttribute("aria-label", said.join(", ") || "nothing is known of when");
    box.append(make("div", "gantt-row", label, track));
  }
  for (const mark of life.marks) {
    const pin = make("div", "pin");
    pin.style.left = `${Math.min(100, (100 * mark.at) / life.length)}%`;
    box.append(pin);
  }
  box.append(axis(0, life.length, Math.min(960, innerWidth - 60), (at) => (at > 1e-9 ? seconds(at) : "0")));
  const legend = make("div", "legend");
  for (const [kind, text] of Object.entries(KINDS)) {
    if (used.has(kind)) legend.append(make("span", "", make("i", `k-${kind}`), text));
  }
  return [legend, box];
}
