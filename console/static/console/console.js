"use strict";
// The console's live parts, as Alpine components. All text reaches the page as text, never as markup.

const EVERY_MS = 3000;
const PULSES_EVERY_MS = 30000;
const COURSE_EVERY_MS = 30000;
const PROGRESS_EVERY_MS = 1000;

const write = {
  count: (value) => (value ?? 0).toLocaleString("en-GB"),

  rate(value) {
    if (!value) return "–";
    return value >= 100 ? write.count(Math.round(value)) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
  },

  share: (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value && value < 0.1 ? 1 : 0)} %`),

  duration(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds === 0) return "0";
    if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
    const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([each]) => seconds >= each);
    return `${Number((seconds / size).toFixed(1))} ${unit}`;
  },

  age(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 1) return "< 1 s";
    if (seconds < 60) return `${Math.floor(seconds)} s`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
    if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
    return `${Math.floor(seconds / 86400)} d`;
  },
};

// Calls `look` every so often, never twice at a time, and not while nobody sees the page; at once when it is seen again.
function everyNowAndThen(look, everyMs) {
  let timer = setTimeout(tick, everyMs);
  let isLooking = false;

  async function tick() {
    clearTimeout(timer);
    if (document.hidden || isLooking) return;
    isLooking = true;
    const goOn = await look();
    isLooking = false;
    if (goOn !== false) timer = setTimeout(tick, everyMs);
  }

  document.addEventListener("visibilitychange", tick);
}

async function readJson(url) {
  const answer = await fetch(url, { headers: { Accept: "application/json" }, credentials: "same-origin" });
  // A session that has ended answers with the login page.
  if (answer.redirected) window.location.reload();
  if (!answer.ok) throw new Error(`${answer.status}`);
  return answer.json();
}

async function copyText(text) {
  // Browsers give pages the clipboard only over HTTPS or on the loopback.
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function given(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

// What every live page says of itself.
const live = {
  state: "live",

  stateText() {
    return { live: "Live", lost: "No answer, trying again" }[this.state];
  },

  async keep(look) {
    try {
      await look();
      this.state = "live";
    } catch {
      this.state = "lost";
    }
  },
};

// -- Charts ---------------------------------------------------------------------------------------------------------

// Told apart by people who see few colours, too: they also differ in lightness.
const SERIES = {
  light: { indigo: "#4f46e5", cyan: "#0891b2", amber: "#d97706", red: "#dc2626", pink: "#db2777", green: "#059669", grey: "#94a3b8" },
  dark: { indigo: "#818cf8", cyan: "#22d3ee", amber: "#fbbf24", red: "#f87171", pink: "#f472b6", green: "#34d399", grey: "#64748b" },
};
const PAPER = {
  light: { text: "#64748b", grid: "#e2e8f0", tip: "#0f172a" },
  dark: { text: "#94a3b8", grid: "#1e293b", tip: "#334155" },
};
const CHARTS = {
  depth: {
    series: [["ready", "Ready", "indigo"], ["delayed", "Delayed", "cyan"], ["in_progress", "In progress", "amber"], ["dead", "Dead", "red"]],
    of: (course, key) => course[key],
    write: (value) => write.count(value),
  },
  outcomes: {
    type: "bar",
    series: [["completed", "Completed", "green"], ["returned", "To be tried again", "amber"], ["failed", "Failed", "pink"], ["died", "Died", "red"], ["cancelled", "Cancelled", "grey"]],
    of: (course, key) => course[key],
    write: (value) => write.count(value),
  },
  waits: { series: percentiles(), of: (course, at) => course.waits[at], write: (value) => write.duration(value) },
  runs: { series: percentiles(), of: (course, at) => course.runs[at], write: (value) => write.duration(value) },
};

// Of the pipeline's marts.
const INSIGHTS = {
  ended: {
    type: "bar",
    series: [["completed", "Completed", "green"], ["nacked", "Given back", "amber"], ["abandoned", "Abandoned", "cyan"], ["expired", "Lease ran out", "indigo"], ["failed", "Failed", "red"], ["cancelled", "Cancelled", "grey"]],
    write: (value) => write.count(value),
  },
  waited: { series: byName(percentiles()), write: (value) => write.duration(value) },
  ran: { series: byName(percentiles()), write: (value) => write.duration(value) },
  workers: {
    series: [["within_60s", "60 s", "green"], ["within_10s", "10 s", "amber"], ["within_1s", "1 s", "red"], ["load", "Busy all the time", "grey"]],
    write: (value) => (Number.isInteger(value) ? write.count(value) : value.toFixed(2)),
  },
  worked: { type: "bar", series: [["compute_ms", "Worker time", "indigo"]], write: (value) => write.duration(value) },
  answered: {
    type: "bar",
    series: [["delivered", "Delivered", "green"], ["refused", "Refused", "amber"], ["unreachable", "Unreachable", "red"]],
    write: (value) => write.count(value),
  },
};
for (const [kind, chart] of Object.entries(INSIGHTS)) CHARTS[kind] = { ...chart, of: (course, key) => course.values[key] };

function byName(series) {
  return series.map(([, name, colour]) => [name, name, colour]);
}

function percentiles() {
  return [[0, "p50", "green"], [1, "p95", "amber"], [2, "p99", "red"]];
}

function isDark() {
  return document.documentElement.classList.contains("dark");
}

function whenThemeChanges(tell) {
  new MutationObserver(tell).observe(document.documentElement, { attributes: true, attributeFilter: ["class"] });
}

// One way to write a moment everywhere: the tables of the admin are in UTC as well.
function moment(ms, withDay) {
  const text = new Date(ms).toISOString();
  return withDay ? `${text.slice(5, 10)} ${text.slice(11, 16)}` : text.slice(11, 16);
}

// A step of a day is that day; a shorter one is known by its end.
function stepName(ms, course) {
  if (course.step_seconds >= 86400) return moment(ms - 1, true).slice(0, 6);
  return moment(ms, course.step_seconds * course.ends_ms.length > 86400);
}

function hasNothing(kind, course) {
  const { series, of } = CHARTS[kind];
  return series.every(([key]) => of(course, key).every((value) => !value));
}

function missing(value) {
  return value === null || value === undefined;
}

function draw(canvas, kind, course) {
  const { type = "line", series, of, write: written } = CHARTS[kind];
  const theme = isDark() ? "dark" : "light";
  const paper = PAPER[theme];
  const isBar = type === "bar";
  return new Chart(canvas, {
    type,
    data: {
      labels: course.ends_ms.map((ms) => stepName(ms, course)),
      datasets: series.map(([key, label, colour]) => ({
        label,
        data: of(course, key),
        borderColor: SERIES[theme][colour],
        backgroundColor: isBar ? SERIES[theme][colour] : `${SERIES[theme][colour]}22`,
        hoverBackgroundColor: SERIES[theme][colour],
        borderWidth: isBar ? 0 : 1.75,
        // A gap stays one; a value between two gaps would not show without its point.
        pointRadius: ({ dataset, dataIndex: at }) => (missing(dataset.data[at - 1]) && missing(dataset.data[at + 1]) ? 2.5 : 0),
        pointHitRadius: 8,
        fill: !isBar && key === "ready",
      })),
    },
    options: {
      animation: false,
      responsive: true,
      maintainAspectRatio: false,
      interaction: { mode: "index", intersect: false },
      scales: {
        x: {
          stacked: isBar,
          grid: { display: false },
          border: { color: paper.grid },
          ticks: { color: paper.text, maxRotation: 0, autoSkipPadding: 24, font: { size: 11 } },
        },
        y: {
          stacked: isBar,
          beginAtZero: true,
          border: { display: false },
          grid: { color: paper.grid },
          ticks: { color: paper.text, maxTicksLimit: 5, font: { size: 11 }, callback: (value) => written(value) },
        },
      },
      plugins: {
        legend: { position: "bottom", labels: { color: paper.text, boxWidth: 10, boxHeight: 10, padding: 14, font: { size: 11 } } },
        tooltip: {
          backgroundColor: paper.tip,
          callbacks: { label: (item) => ` ${item.dataset.label}: ${written(item.raw)}` },
        },
      },
    },
  });
}

document.addEventListener("alpine:init", () => {
  Alpine.data("overview", (dataUrl, queueUrl, deadUrl) => ({
    ...write,
    ...live,
    rows: [],
    signs: [],
    pulses: {},
    isPartial: false,
    tenant: new URLSearchParams(location.search).get("tenant") ?? "",
    command: "",
    only: "",
    order: { key: "", up: true },
    pulsesAt: 0,
    columns: [
      { key: "command", name: "Queue" },
      { key: "ready", name: "Ready", number: true },
      { key: "delayed", name: "Delayed", number: true },
      { key: "in_progress", name: "In progress", number: true },
      { key: "dead", name: "Dead", number: true },
      { key: "oldest_seconds", name: "Oldest", number: true },
      { key: "arrivals", name: "In / s", number: true },
      { key: "endings", name: "Out / s", number: true },
      { key: "failures", name: "Failed", number: true },
    ],

    init() {
      this.take(given("overview"));
      this.pulsesAt = Date.now();
      everyNowAndThen(() => this.refresh(), EVERY_MS);
      this.$watch("tenant", () => this.isPartial && this.refresh(true));
    },

    refresh(withPulses = Date.now() - this.pulsesAt > PULSES_EVERY_MS) {
      const asked = new URLSearchParams();
      if (withPulses) asked.set("pulses", "1");
      if (this.isPartial && this.tenant) asked.set("tenant", this.tenant);
      return this.keep(async () => {
        this.take(await readJson(`${dataUrl}?${asked}`));
        if (withPulses) this.pulsesAt = Date.now();
      });
    },

    take(found) {
      if (found.pulses) this.pulses = found.pulses;
      this.signs = found.signs;
      this.isPartial = found.is_partial;
      this.rows = found.rows.map((row) => {
        const key = `${row.tid}:${row.command}`;
        const [arrivals, endings, failures, spark] = this.pulses[key] ?? [0, 0, null, []];
        const query = new URLSearchParams({ tenant: row.tid, command: row.command });
        return { ...row, key, url: `${queueUrl}?${query}`, deadUrl: `${deadUrl}?${query}`, arrivals, endings, failures, spark };
      });
    },

    shown() {
      const tenant = this.tenant.trim().toLowerCase();
      const command = this.command.trim().toLowerCase();
      const rows = this.rows.filter(
        (row) =>
          row.tenant.toLowerCase().includes(tenant) &&
          row.command.toLowerCase().includes(command) &&
          (this.only !== "dead" || row.dead > 0) &&
          (this.only !== "paused" || row.is_paused || row.is_suspended) &&
          (this.only !== "busy" || row.ready + row.delayed + row.in_progress > 0),
      );
      const { key, up } = this.order;
      if (!key) return rows;
      const of = (row) => row[key] ?? -1;
      return rows.sort((a, b) => (up ? 1 : -1) * (of(a) > of(b) ? 1 : of(a) < of(b) ? -1 : 0));
    },

    sortBy(key) {
      // Numbers are looked at from the largest, names from the first.
      const up = this.order.key === key ? !this.order.up : key === "command";
      this.order = { key, up };
    },

    sortOf(key) {
      return this.order.key === key ? (this.order.up ? "ascending" : "descending") : "none";
    },

    arrow(key) {
      return this.order.key === key ? (this.order.up ? " ↑" : " ↓") : "";
    },

    tiles() {
      const rows = this.shown();
      const sum = (key) => rows.reduce((total, row) => total + (row[key] || 0), 0);
      const dead = sum("dead");
      return [
        { key: "ready", name: "Ready", value: write.count(sum("ready")) },
        { key: "delayed", name: "Delayed", value: write.count(sum("delayed")) },
        { key: "in_progress", name: "In progress", value: write.count(sum("in_progress")) },
        { key: "dead", name: "Dead letters", value: write.count(dead), tone: dead ? "bad" : "" },
        { key: "arrivals", name: "Arriving", value: write.rate(sum("arrivals")), unit: " / s" },
        { key: "endings", name: "Ending", value: write.rate(sum("endings")), unit: " / s" },
      ];
    },

    emptyText() {
      return this.rows.length
        ? "No queue is like that."
        : "No queues yet. The first task enqueued for a command makes its queue.";
    },

    points(values) {
      const most = Math.max(...values, 1);
      const step = 120 / Math.max(values.length - 1, 1);
      return values.map((value, at) => `${(at * step).toFixed(1)},${(26 - (24 * value) / most).toFixed(1)}`);
    },

    sparkLine(values) {
      return values.length ? `M${this.points(values).join("L")}` : "";
    },

    sparkArea(values) {
      return values.length ? `M0,28L${this.points(values).join("L")}L120,28Z` : "";
    },

    sparkText(row) {
      return row.spark.length
        ? `Ready in the last hour: now ${row.ready}, at most ${Math.max(...row.spark)}`
        : "Nothing was ready in the last hour";
    },
  }));

  Alpine.data("queue", (dataUrl, courseUrl, taskUrl) => {
    // Outside of Alpine's reach: a chart that it watched would draw itself for ever.
    const charts = new Map();
    let course = null;

    return {
      ...write,
      ...live,
      stats: {},
      peeked: { in_line: [], in_progress: [], delayed: [] },
      nowMs: 0,
      span: "1h",
      empty: [],

      init() {
        this.take(given("live"));
        everyNowAndThen(() => this.refresh(), EVERY_MS);
        everyNowAndThen(() => this.chart(), COURSE_EVERY_MS);
        this.chart();
        this.$watch("span", () => this.chart());
        whenThemeChanges(() => this.redraw());
      },

      take(found) {
        this.nowMs = found.now_ms;
        this.stats = found.stats;
        this.peeked = found.peeked;
      },

      refresh() {
        return this.keep(async () => this.take(await readJson(dataUrl)));
      },

      chart() {
        return this.keep(async () => {
          course = await readJson(`${courseUrl}&span=${this.span}`);
          this.redraw();
        });
      },

      redraw() {
        if (!course) return;
        const canvases = [...this.$root.querySelectorAll("canvas[data-chart]")];
        this.empty = canvases.map((canvas) => canvas.dataset.chart).filter((kind) => hasNothing(kind, course));
        for (const canvas of canvases) {
          charts.get(canvas)?.destroy();
          charts.set(canvas, draw(canvas, canvas.dataset.chart, course));
        }
      },

      isEmpty(kind) {
        return this.empty.includes(kind);
      },

      tiles() {
        const stats = this.stats;
        const oldest = stats.oldest_ready_ms ? (this.nowMs - stats.oldest_ready_ms) / 1000 : null;
        return [
          { name: "Ready", value: write.count(stats.ready) },
          { name: "Delayed", value: write.count(stats.delayed) },
          { name: "In progress", value: write.count(stats.in_progress) },
          { name: "Dead letters", value: write.count(stats.dlq), tone: stats.dlq ? "bad" : "" },
          { name: "Oldest ready", value: write.age(oldest) },
        ];
      },

      taskUrl: (id) => `${taskUrl}&id=${id}`,

      since(ms) {
        return write.age(Math.max(0, this.nowMs - ms) / 1000);
      },

      until(ms) {
        return ms < this.nowMs ? `${write.age((this.nowMs - ms) / 1000)} ago` : write.age((ms - this.nowMs) / 1000);
      },
    };
  });

  Alpine.data("insights", () => {
    const charts = new Map();
    const courses = given("courses");

    return {
      init() {
        this.redraw();
        whenThemeChanges(() => this.redraw());
      },

      redraw() {
        for (const canvas of this.$root.querySelectorAll("canvas[data-chart]")) {
          const kind = canvas.dataset.chart;
          charts.get(canvas)?.destroy();
          charts.set(canvas, draw(canvas, kind, courses[kind]));
        }
      },

      isEmpty: (kind) => hasNothing(kind, courses[kind]),
    };
  });

  Alpine.data("taskPage", () => ({
    wrong: "",

    async copy(from, button) {
      await copyText(from.textContent);
      const words = button.lastElementChild;
      words.textContent = "Copied";
      setTimeout(() => (words.textContent = "Copy"), 1500);
    },

    edit() {
      this.$refs.editor.showModal();
      this.$refs.text.focus();
      this.$refs.text.setSelectionRange(0, 0);
    },

    // The server checks it again, and keeps every digit of every number.
    check(event) {
      try {
        JSON.parse(this.$refs.text.value);
      } catch (error) {
        event.preventDefault();
        this.wrong = `This is not JSON: ${error.message}`;
      }
    },
  }));

  Alpine.data("picking", () => ({
    picked: [],

    all() {
      return [...this.$root.querySelectorAll("input[name=pick]")].map((box) => box.value);
    },

    pickAll(isOn) {
      this.picked = isOn ? this.all() : [];
    },
  }));

  Alpine.data("bulkJob", (dataUrl) => ({
    ...write,
    ...live,
    job: {},

    init() {
      this.job = given("progress");
      if (this.job.is_over) return;
      everyNowAndThen(async () => {
        await this.keep(async () => (this.job = await readJson(dataUrl)));
        // What could not be done is listed by the page.
        if (this.job.is_over && this.job.skipped + this.job.failed) window.location.reload();
        return !this.job.is_over;
      }, PROGRESS_EVERY_MS);
    },

    part(name) {
      return this.job.total ? (100 * this.job[name]) / this.job.total : 0;
    },

    share() {
      if (this.job.is_over) return write.count(this.job.handled);
      return this.job.total === null ? "Counting" : `${Math.floor(this.job.total ? (100 * this.job.handled) / this.job.total : 0)} %`;
    },

    sentence() {
      const { handled, total, per_second: rate, seconds, is_over: isOver } = this.job;
      if (isOver) return `dealt with in ${write.duration(seconds)}`;
      if (total === null) return "what there is to do";
      const left = rate ? `, about ${write.age((total - handled) / rate)} to go` : "";
      return `${write.count(handled)} of ${write.count(total)}${left}`;
    },

    tiles() {
      const job = this.job;
      return [
        { name: "Done", value: write.count(job.done) },
        { name: "Skipped", value: write.count(job.skipped) },
        { name: "Failed", value: write.count(job.failed), tone: job.failed ? "bad" : "" },
        { name: "Per second", value: write.rate(job.per_second) },
        ...(job.canaries_died === null ? [] : [{ name: "Canaries that died", value: job.canaries_died, tone: job.canaries_died ? "bad" : "" }]),
      ];
    },
  }));
});
