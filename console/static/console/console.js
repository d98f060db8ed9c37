"use strict";
// Alpine components of the console's live pages. They insert values as text, never as markup.

const REFRESH_MS = 3000;
const RATES_REFRESH_MS = 30000;
const CHARTS_REFRESH_MS = 30000;
const PROGRESS_REFRESH_MS = 1000;

const format = {
  count: (value) => (value ?? 0).toLocaleString("en-GB"),

  rate(value, zero = "–") {
    if (!value) return zero;
    if (value < 0.005) return "< 0.01";
    return value >= 100 ? format.count(Math.round(value)) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
  },

  share: (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value && value < 0.1 ? 1 : 0)} %`),

  duration(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds === 0) return "0";
    if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
    const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([size]) => seconds >= size);
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

// Call `refresh` at an interval while the page is visible, and at once when it becomes visible. Calls do not overlap.
// If `refresh` returns false, the interval ends. It is then called only when the page becomes visible again.
function pollWhileVisible(refresh, intervalMs) {
  let timer = setTimeout(tick, intervalMs);
  let isRunning = false;

  async function tick() {
    clearTimeout(timer);
    if (document.hidden || isRunning) return;
    isRunning = true;
    const shouldContinue = await refresh();
    isRunning = false;
    if (shouldContinue !== false) timer = setTimeout(tick, intervalMs);
  }

  document.addEventListener("visibilitychange", tick);
}

async function readJson(url) {
  const response = await fetch(url, { headers: { Accept: "application/json" }, credentials: "same-origin" });
  // After the session has expired, the request is redirected to the login page.
  if (response.redirected) window.location.reload();
  if (!response.ok) throw new Error(`${response.status}`);
  return response.json();
}

async function copyText(text) {
  // Browsers offer the clipboard API only over HTTPS and on the loopback interface.
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function readJsonScript(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

// The state of a live page's connection to the server.
const connection = {
  state: "live",

  stateText() {
    return { live: "Live", lost: "No response, retrying" }[this.state];
  },

  async track(request) {
    try {
      await request();
      this.state = "live";
    } catch {
      this.state = "lost";
    }
  },
};

// --- Charts ---

// The colours also differ in lightness, for colour-blind users.
const SERIES_COLOURS = {
  light: { indigo: "#4f46e5", cyan: "#0891b2", amber: "#d97706", red: "#dc2626", pink: "#db2777", green: "#059669", grey: "#94a3b8" },
  dark: { indigo: "#818cf8", cyan: "#22d3ee", amber: "#fbbf24", red: "#f87171", pink: "#f472b6", green: "#34d399", grey: "#64748b" },
};
const FRAME_COLOURS = {
  light: { text: "#64748b", grid: "#e2e8f0", tip: "#0f172a" },
  dark: { text: "#94a3b8", grid: "#1e293b", tip: "#334155" },
};
const CHARTS = {
  depth: {
    series: [["ready", "Ready", "indigo"], ["delayed", "Delayed", "cyan"], ["in_progress", "In progress", "amber"], ["dead", "Dead letters", "red"]],
    valuesOf: (timeSeries, key) => timeSeries[key],
    formatValue: format.count,
  },
  outcomes: {
    type: "bar",
    series: [["completed", "Completed", "green"], ["returned", "Returned for retry", "amber"], ["failed", "Failed", "pink"], ["died", "Dead letters", "red"], ["cancelled", "Cancelled", "grey"]],
    valuesOf: (timeSeries, key) => timeSeries[key],
    formatValue: format.count,
  },
  waits: { series: percentiles(), valuesOf: (timeSeries, index) => timeSeries.waits[index], formatValue: format.duration },
  runs: { series: percentiles(), valuesOf: (timeSeries, index) => timeSeries.runs[index], formatValue: format.duration },
};

// The charts of the pipeline's marts.
const HISTORY_CHARTS = {
  ended: {
    type: "bar",
    series: [["completed", "Completed", "green"], ["nacked", "Nacked", "amber"], ["abandoned", "Abandoned", "cyan"], ["expired", "Lease expired", "indigo"], ["failed", "Failed", "red"], ["cancelled", "Cancelled", "grey"]],
    formatValue: format.count,
  },
  wait_time: { series: byName(percentiles()), formatValue: format.duration },
  run_time: { series: byName(percentiles()), formatValue: format.duration },
  workers: {
    series: [["within_60s", "60 s", "green"], ["within_10s", "10 s", "amber"], ["within_1s", "1 s", "red"], ["load", "Mean busy workers", "grey"]],
    formatValue: (value) => (Number.isInteger(value) ? format.count(value) : value.toFixed(2)),
  },
  worker_time: { type: "bar", series: [["compute_ms", "Worker time", "indigo"]], formatValue: format.duration },
  deliveries: {
    type: "bar",
    series: [["delivered", "Delivered", "green"], ["refused", "Rejected", "amber"], ["unreachable", "Unreachable", "red"]],
    formatValue: format.count,
  },
};
for (const [kind, chart] of Object.entries(HISTORY_CHARTS)) CHARTS[kind] = { ...chart, valuesOf: (timeSeries, key) => timeSeries.values[key] };

function byName(series) {
  return series.map(([, name, colour]) => [name, name, colour]);
}

function percentiles() {
  return [[0, "p50", "green"], [1, "p95", "amber"], [2, "p99", "red"]];
}

function isDark() {
  return document.documentElement.classList.contains("dark");
}

function onThemeChange(callback) {
  new MutationObserver(callback).observe(document.documentElement, { attributes: true, attributeFilter: ["class"] });
}

// Times are in UTC, as in the tables of the admin.
function formatTime(ms, withDay) {
  const text = new Date(ms).toISOString();
  return withDay ? `${text.slice(5, 10)} ${text.slice(11, 16)}` : text.slice(11, 16);
}

// A step of one day is labelled with the day, a shorter step with the time of its end.
function stepLabel(ms, timeSeries) {
  if (timeSeries.step_seconds >= 86400) return formatTime(ms - 1, true).slice(0, 6);
  return formatTime(ms, timeSeries.step_seconds * timeSeries.ends_ms.length > 86400);
}

function isEmptyChart(kind, timeSeries) {
  const { series, valuesOf } = CHARTS[kind];
  return series.every(([key]) => valuesOf(timeSeries, key).every((value) => !value));
}

// Chart.js rounds the steps of an axis to decimal numbers of seconds, which gives labels such as 33.3 min. These steps are
// round in minutes, hours or days. Each is at most twice the one before.
const DURATION_STEPS = [30, 60, 120, 240, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

function durationStep(seconds) {
  const longest = Math.max(...seconds);
  if (longest <= 60) return undefined;
  return DURATION_STEPS.find((step) => longest <= 4 * step) ?? 86400 * Math.ceil(longest / (4 * 86400));
}

function isMissing(value) {
  return value === null || value === undefined;
}

function drawChart(canvas, kind, timeSeries) {
  const { type = "line", series, valuesOf, formatValue } = CHARTS[kind];
  const theme = isDark() ? "dark" : "light";
  const frame = FRAME_COLOURS[theme];
  const isBar = type === "bar";
  const stepSize = formatValue === format.duration ? durationStep(series.flatMap(([key]) => valuesOf(timeSeries, key))) : undefined;
  return new Chart(canvas, {
    type,
    data: {
      labels: timeSeries.ends_ms.map((ms) => stepLabel(ms, timeSeries)),
      datasets: series.map(([key, label, colour]) => ({
        label,
        data: valuesOf(timeSeries, key),
        borderColor: SERIES_COLOURS[theme][colour],
        backgroundColor: isBar ? SERIES_COLOURS[theme][colour] : `${SERIES_COLOURS[theme][colour]}22`,
        hoverBackgroundColor: SERIES_COLOURS[theme][colour],
        borderWidth: isBar ? 0 : 1.75,
        // Missing values are gaps in the line. A single value between two gaps needs a point to be visible.
        pointRadius: ({ dataset, dataIndex: index }) => (isMissing(dataset.data[index - 1]) && isMissing(dataset.data[index + 1]) ? 2.5 : 0),
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
          border: { color: frame.grid },
          ticks: { color: frame.text, maxRotation: 0, autoSkipPadding: 24, font: { size: 11 } },
        },
        y: {
          stacked: isBar,
          beginAtZero: true,
          border: { display: false },
          grid: { color: frame.grid },
          ticks: { color: frame.text, maxTicksLimit: 5, stepSize, font: { size: 11 }, callback: (value) => formatValue(value) },
        },
      },
      plugins: {
        legend: { position: "bottom", labels: { color: frame.text, boxWidth: 10, boxHeight: 10, padding: 14, font: { size: 11 } } },
        tooltip: {
          backgroundColor: frame.tip,
          callbacks: { label: (item) => ` ${item.dataset.label}: ${formatValue(item.raw)}` },
        },
      },
    },
  });
}

document.addEventListener("alpine:init", () => {
  Alpine.data("overview", (dataUrl, queueUrl, deadUrl) => ({
    ...format,
    ...connection,
    rows: [],
    checks: [],
    rates: {},
    isPartial: false,
    tenant: new URLSearchParams(location.search).get("tenant") ?? "",
    command: "",
    show: "",
    order: { key: "", isAscending: true },
    ratesReadAt: 0,
    columns: [
      { key: "command", name: "Queue" },
      { key: "ready", name: "Ready", number: true },
      { key: "delayed", name: "Delayed", number: true },
      { key: "in_progress", name: "In progress", number: true },
      { key: "dead", name: "Dead letters", number: true },
      { key: "oldest_seconds", name: "Oldest ready", number: true },
      { key: "arrivals", name: "Enqueued / s", number: true },
      { key: "endings", name: "Ended / s", number: true },
      { key: "failureShare", name: "Failure rate", number: true },
    ],

    init() {
      this.update(readJsonScript("overview"));
      this.ratesReadAt = Date.now();
      pollWhileVisible(() => this.refresh(), REFRESH_MS);
      this.$watch("tenant", () => this.isPartial && this.refresh(true));
    },

    refresh(withRates = Date.now() - this.ratesReadAt > RATES_REFRESH_MS) {
      const query = new URLSearchParams();
      if (withRates) query.set("rates", "1");
      if (this.isPartial && this.tenant) query.set("tenant", this.tenant);
      return this.track(async () => {
        this.update(await readJson(`${dataUrl}?${query}`));
        if (withRates) this.ratesReadAt = Date.now();
      });
    },

    update(overview) {
      if (overview.rates) this.rates = overview.rates;
      this.checks = overview.checks;
      this.isPartial = overview.is_partial;
      this.rows = overview.queues.map((queue) => {
        const key = `${queue.tid}:${queue.command}`;
        const [arrivals, endings, failureShare, spark] = this.rates[key] ?? [0, 0, null, []];
        const query = new URLSearchParams({ tenant: queue.tid, command: queue.command });
        return { ...queue, key, url: `${queueUrl}?${query}`, deadUrl: `${deadUrl}?${query}`, arrivals, endings, failureShare, spark };
      });
    },

    visibleRows() {
      const tenant = this.tenant.trim().toLowerCase();
      const command = this.command.trim().toLowerCase();
      const rows = this.rows.filter(
        (row) =>
          row.tenant.toLowerCase().includes(tenant) &&
          row.command.toLowerCase().includes(command) &&
          (this.show !== "dead" || row.dead > 0) &&
          (this.show !== "paused" || row.is_paused || row.is_suspended) &&
          (this.show !== "busy" || row.ready + row.delayed + row.in_progress > 0),
      );
      const { key, isAscending } = this.order;
      if (!key) return rows;
      const valueOf = (row) => row[key] ?? -1;
      const compare = (a, b) => (valueOf(a) > valueOf(b) ? 1 : valueOf(a) < valueOf(b) ? -1 : 0);
      return rows.sort((a, b) => (isAscending ? compare(a, b) : compare(b, a)));
    },

    sortBy(key) {
      // The first click sorts numbers from the largest, and names alphabetically.
      const isAscending = this.order.key === key ? !this.order.isAscending : key === "command";
      this.order = { key, isAscending };
    },

    ariaSort(key) {
      return this.order.key === key ? (this.order.isAscending ? "ascending" : "descending") : "none";
    },

    arrow(key) {
      return this.order.key === key ? (this.order.isAscending ? " ↑" : " ↓") : "";
    },

    tiles() {
      const rows = this.visibleRows();
      const sum = (key) => rows.reduce((total, row) => total + (row[key] || 0), 0);
      const dead = sum("dead");
      return [
        { key: "ready", name: "Ready", value: format.count(sum("ready")) },
        { key: "delayed", name: "Delayed", value: format.count(sum("delayed")) },
        { key: "in_progress", name: "In progress", value: format.count(sum("in_progress")) },
        { key: "dead", name: "Dead letters", value: format.count(dead), tone: dead ? "bad" : "" },
        { key: "arrivals", name: "Enqueued", value: format.rate(sum("arrivals"), "0"), unit: " / s" },
        { key: "endings", name: "Ended", value: format.rate(sum("endings"), "0"), unit: " / s" },
      ];
    },

    emptyText() {
      return this.rows.length
        ? "No queues match the filters."
        : "No queues yet. Enqueue a task to create its queue.";
    },

    points(values) {
      const highest = Math.max(...values, 1);
      const step = 120 / Math.max(values.length - 1, 1);
      return values.map((value, index) => `${(index * step).toFixed(1)},${(26 - (24 * value) / highest).toFixed(1)}`);
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
        : "No ready tasks in the last hour";
    },
  }));

  Alpine.data("queue", (dataUrl, chartsUrl, taskUrl) => {
    // Charts are not part of the component's data: Alpine would observe them, and each drawing would trigger another.
    const charts = new Map();
    let timeSeries = null;

    return {
      ...format,
      ...connection,
      stats: {},
      peek: { ready: [], in_progress: [], delayed: [] },
      nowMs: 0,
      span: "1h",
      emptyCharts: [],

      init() {
        this.update(readJsonScript("live"));
        pollWhileVisible(() => this.refresh(), REFRESH_MS);
        pollWhileVisible(() => this.refreshCharts(), CHARTS_REFRESH_MS);
        this.refreshCharts();
        this.$watch("span", () => this.refreshCharts());
        onThemeChange(() => this.redraw());
      },

      update(queue) {
        this.nowMs = queue.now_ms;
        this.stats = queue.stats;
        this.peek = queue.peek;
      },

      refresh() {
        return this.track(async () => this.update(await readJson(dataUrl)));
      },

      refreshCharts() {
        return this.track(async () => {
          timeSeries = await readJson(`${chartsUrl}&span=${this.span}`);
          this.redraw();
        });
      },

      redraw() {
        if (!timeSeries) return;
        const canvases = [...this.$root.querySelectorAll("canvas[data-chart]")];
        this.emptyCharts = canvases.map((canvas) => canvas.dataset.chart).filter((kind) => isEmptyChart(kind, timeSeries));
        for (const canvas of canvases) {
          charts.get(canvas)?.destroy();
          charts.set(canvas, drawChart(canvas, canvas.dataset.chart, timeSeries));
        }
      },

      isEmpty(kind) {
        return this.emptyCharts.includes(kind);
      },

      tiles() {
        const stats = this.stats;
        const oldest = stats.oldest_ready_ms ? (this.nowMs - stats.oldest_ready_ms) / 1000 : null;
        return [
          { name: "Ready", value: format.count(stats.ready) },
          { name: "Delayed", value: format.count(stats.delayed) },
          { name: "In progress", value: format.count(stats.in_progress) },
          { name: "Dead letters", value: format.count(stats.dlq), tone: stats.dlq ? "bad" : "" },
          { name: "Oldest ready", value: format.age(oldest) },
        ];
      },

      taskUrl: (id) => `${taskUrl}&id=${id}`,

      since(ms) {
        return format.age(Math.max(0, this.nowMs - ms) / 1000);
      },

      until(ms) {
        return ms < this.nowMs ? `${format.age((this.nowMs - ms) / 1000)} ago` : `in ${format.age((ms - this.nowMs) / 1000)}`;
      },
    };
  });

  Alpine.data("historyCharts", () => {
    const charts = new Map();
    const timeSeries = readJsonScript("time-series");

    return {
      init() {
        this.redraw();
        onThemeChange(() => this.redraw());
      },

      redraw() {
        for (const canvas of this.$root.querySelectorAll("canvas[data-chart]")) {
          const kind = canvas.dataset.chart;
          charts.get(canvas)?.destroy();
          charts.set(canvas, drawChart(canvas, kind, timeSeries[kind]));
        }
      },

      isEmpty: (kind) => isEmptyChart(kind, timeSeries[kind]),
    };
  });

  Alpine.data("taskPage", () => ({
    payloadError: "",

    async copy(element, button) {
      await copyText(element.textContent);
      const label = button.lastElementChild;
      label.textContent = "Copied";
      setTimeout(() => (label.textContent = "Copy"), 1500);
    },

    edit() {
      this.$refs.editor.showModal();
      this.$refs.text.focus();
      this.$refs.text.setSelectionRange(0, 0);
    },

    // The server validates the payload again. It stores the text, so numbers keep all digits.
    validate(event) {
      try {
        JSON.parse(this.$refs.text.value);
      } catch (error) {
        event.preventDefault();
        this.payloadError = `The payload is not valid JSON: ${error.message}`;
      }
    },
  }));

  Alpine.data("selection", () => ({
    selected: [],

    allKeys() {
      return [...this.$root.querySelectorAll("input[name=select]")].map((box) => box.value);
    },

    selectAll(isSelected) {
      this.selected = isSelected ? this.allKeys() : [];
    },
  }));

  Alpine.data("bulkJob", (dataUrl) => ({
    ...format,
    ...connection,
    job: {},

    init() {
      this.job = readJsonScript("progress");
      if (this.job.is_over) return;
      pollWhileVisible(async () => {
        await this.track(async () => (this.job = await readJson(dataUrl)));
        // The reloaded page lists the tasks that were skipped or failed.
        if (this.job.is_over && this.job.skipped + this.job.failed) window.location.reload();
        return !this.job.is_over;
      }, PROGRESS_REFRESH_MS);
    },

    partPercent(name) {
      return this.job.total ? (100 * this.job[name]) / this.job.total : 0;
    },

    progressHeadline() {
      if (this.job.is_over) return format.count(this.job.processed);
      return this.job.total === null ? "Counting" : `${Math.floor(this.job.total ? (100 * this.job.processed) / this.job.total : 0)} %`;
    },

    progressDetails() {
      const { processed, total, per_second: rate, seconds, is_over: isOver } = this.job;
      if (isOver) return `processed in ${format.duration(seconds)}`;
      if (total === null) return "the matching dead letters";
      const remaining = rate ? `, about ${format.age((total - processed) / rate)} left` : "";
      return `${format.count(processed)} of ${format.count(total)}${remaining}`;
    },

    tiles() {
      const job = this.job;
      return [
        { name: "Done", value: format.count(job.done) },
        { name: "Skipped", value: format.count(job.skipped) },
        { name: "Failed", value: format.count(job.failed), tone: job.failed ? "bad" : "" },
        { name: "Per second", value: format.rate(job.per_second) },
        ...(job.failed_canaries === null ? [] : [{ name: "Failed canaries", value: job.failed_canaries, tone: job.failed_canaries ? "bad" : "" }]),
      ];
    },
  }));
});
