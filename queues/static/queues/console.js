"use strict";
// The console's live parts, as Alpine components. All text reaches the page as text, never as markup.

const EVERY_MS = 3000;
const PULSES_EVERY_MS = 30000;

const write = {
  count: (value) => (value ?? 0).toLocaleString("en-GB"),

  rate(value) {
    if (!value) return "–";
    return value >= 100 ? write.count(Math.round(value)) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
  },

  share: (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value && value < 0.1 ? 1 : 0)} %`),

  age(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 1) return "< 1 s";
    if (seconds < 60) return `${Math.floor(seconds)} s`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
    if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
    return `${Math.floor(seconds / 86400)} d`;
  },
};

// Calls `look` at once and every few seconds, never twice at a time, and not while nobody sees the page.
function everyNowAndThen(look, everyMs) {
  let timer = 0;
  let isLooking = false;
  const tick = async () => {
    clearTimeout(timer);
    if (document.hidden || isLooking) return;
    isLooking = true;
    const goOn = await look();
    isLooking = false;
    if (goOn !== false) timer = setTimeout(tick, everyMs);
  };
  document.addEventListener("visibilitychange", tick);
  timer = setTimeout(tick, everyMs);
  return tick;
}

async function readJson(url) {
  const answer = await fetch(url, { headers: { Accept: "application/json" }, credentials: "same-origin" });
  // A session that has ended answers with the login page.
  if (answer.redirected) window.location.reload();
  if (!answer.ok) throw new Error(`${answer.status}`);
  return answer.json();
}

function given(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

document.addEventListener("alpine:init", () => {
  Alpine.data("overview", (dataUrl, queueUrl) => ({
    ...write,
    rows: [],
    signs: [],
    pulses: {},
    isPartial: false,
    tenant: "",
    command: "",
    only: "",
    order: { key: "", up: true },
    state: "live",
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
      this.look = everyNowAndThen(() => this.refresh(), EVERY_MS);
      this.$watch("tenant", () => this.isPartial && this.refresh(true));
      document.addEventListener("visibilitychange", () => {
        if (document.hidden) this.state = "paused";
      });
    },

    async refresh(withPulses = Date.now() - this.pulsesAt > PULSES_EVERY_MS) {
      const asked = new URLSearchParams();
      if (withPulses) asked.set("pulses", "1");
      if (this.isPartial && this.tenant) asked.set("tenant", this.tenant);
      try {
        this.take(await readJson(`${dataUrl}?${asked}`));
        if (withPulses) this.pulsesAt = Date.now();
        this.state = "live";
      } catch {
        this.state = "lost";
      }
    },

    take(found) {
      if (found.pulses) this.pulses = found.pulses;
      this.signs = found.signs;
      this.isPartial = found.is_partial;
      this.rows = found.rows.map((row) => {
        const key = `${row.tid}:${row.command}`;
        const [arrivals, endings, failures, spark] = this.pulses[key] ?? [0, 0, null, []];
        const url = `${queueUrl}?${new URLSearchParams({ tenant: row.tid, command: row.command })}`;
        return { ...row, key, url, arrivals, endings, failures, spark };
      });
    },

    stateText() {
      return { live: "Live", paused: "Paused", lost: "No answer, trying again" }[this.state];
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
});
