// Zoom into pictures of the step, say what is under the pointer, copy fixes, search. The page reads the same without it.
(() => {
  "use strict";
  document.documentElement.classList.add("scripted");

  const milliseconds = (value) =>
    value < 0.0995 && value > 0 ? `${(1000 * value).toPrecision(3)} us` : `${Number(value.toPrecision(4))} ms`;
  const rounded = (value) => Number(value.toPrecision(12));

  // What is drawn of each rank, read from the diagnosis of this page when it is first asked for.
  let known = null;
  const rowsOfRanks = () => {
    if (known === null) {
      known = new Map();
      const text = document.getElementById("tracedoc-diagnosis").textContent;
      const rows = text ? JSON.parse(text).detail.picture?.rows ?? [] : [];
      for (const row of rows) known.set(String(row.rank), row);
    }
    return known;
  };

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  document.body.append(tip);

  const zoomable = (section) => {
    const picture = section.querySelector(".picture");
    const span = Number(picture.dataset.span);
    const drawings = [...picture.querySelectorAll("svg")];
    const marks = [...picture.querySelectorAll(".mark")].map((mark) => ({
      mark, left: parseFloat(mark.style.left), width: parseFloat(mark.style.width),
    }));
    const axis = picture.querySelector(".axis");
    const shown = section.querySelector(".shown");
    let from = 0;
    let to = 1000;

    const draw = () => {
      const width = to - from;
      for (const drawing of drawings) drawing.setAttribute("viewBox", `${from} 0 ${width} 10`);
      for (const { mark, left, width: wide } of marks) {
        mark.style.left = `${(10 * left - from) / width * 100}%`;
        mark.style.width = `${10 * wide / width * 100}%`;
      }
      const length = span * width / 1000;
      const exponent = Math.floor(Math.log10(length / 6));
      const step = [1, 2, 5, 10].map((one) => one * 10 ** exponent).find((one) => length / one <= 6);
      const first = Math.ceil(span * from / 1000 / step);
      axis.replaceChildren(...Array.from({ length: 8 }, (_, i) => (first + i) * step)
        .filter((at) => at <= span * to / 1000 + 1e-9)
        .map((at) => {
          const tick = document.createElement("span");
          const place = (1000 * at / span - from) / width * 100;
          tick.style.left = `${place}%`;
          tick.textContent = milliseconds(rounded(at));
          if (place > 94) tick.className = "end";
          return tick;
        }));
      shown.textContent = `${milliseconds(span * from / 1000)} to ${milliseconds(span * to / 1000)}`;
    };

    const show = (start, width) => {
      const wide = Math.min(1000, Math.max(1, width));
      from = Math.min(Math.max(0, start), 1000 - wide);
      to = from + wide;
      draw();
    };
    const zoom = (factor, at = (from + to) / 2) => show(at - (at - from) * factor, (to - from) * factor);
    const pan = (share) => show(from + share * (to - from), to - from);

    // The kernels, collectives and gaps at an instant by name, the shortest first.
    const names = JSON.parse(picture.dataset.names ?? "[]");
    const calledAt = (row, ms) => {
      const there = (row.named ?? []).filter(([start, end]) => start <= ms && ms < end);
      there.sort(([from, to], [start, end]) => (to - from) - (end - start));
      return there.slice(0, 2).map(([start, end, name]) => `: ${names[name]} (${milliseconds(rounded(end - start))})`).join("");
    };

    // The stretch of a rank at an instant: what is painted last lies on top.
    const stretchAt = (lane, ms) => {
      const row = rowsOfRanks().get(lane.dataset.rank);
      if (!row) return null;
      for (const path of [...lane.querySelectorAll(".states path")].reverse()) {
        const found = (row.spans_ms[path.dataset.name] ?? []).find(([start, end]) => start <= ms && ms < end);
        if (found) return { words: path.dataset.words, start: found[0], end: found[1], called: calledAt(row, ms) };
      }
      return null;
    };
    const sentence = (lane, stretch) => `rank ${lane.dataset.rank}: ${stretch.words}, ` +
      `${milliseconds(rounded(stretch.start))} to ${milliseconds(rounded(stretch.end))} ` +
      `(${milliseconds(rounded(stretch.end - stretch.start))})${stretch.called}`;

    // With keys: a chosen rank, and an instant on it.
    const lanes = [...picture.querySelectorAll("[data-rank]")];
    let chosen = -1;
    let instant = 0;
    const choose = (number) => {
      if (!lanes.length) return;
      lanes[chosen]?.classList.remove("chosen");
      chosen = Math.min(Math.max(0, number), lanes.length - 1);
      lanes[chosen].classList.add("chosen");
      lanes[chosen].scrollIntoView({ block: "nearest" });
      instant = span * from / 1000;
      const svg = lanes[chosen].querySelector("svg");
      shown.textContent = svg.getAttribute("aria-label");
    };
    const stepThrough = (forward) => {
      if (!lanes.length) return;
      if (chosen < 0) choose(0);
      const lane = lanes[chosen];
      const spans = Object.entries(rowsOfRanks().get(lane.dataset.rank)?.spans_ms ?? {})
        .filter(([name]) => name !== "communication").flatMap(([, pairs]) => pairs);
      const starts = [...new Set(spans.map(([start]) => start))].sort((a, b) => a - b);
      const next = forward ? starts.find((start) => start > instant) : starts.filter((start) => start < instant).pop();
      if (next === undefined) return;
      instant = next;
      const stretch = stretchAt(lane, instant);
      if (stretch) shown.textContent = sentence(lane, stretch);
    };

    const actions = {
      "+": () => zoom(0.5), "-": () => zoom(2), "0": () => show(0, 1000),
      ArrowLeft: () => pan(-0.25), ArrowRight: () => pan(0.25),
      ArrowUp: () => choose(chosen - 1), ArrowDown: () => choose(chosen + 1),
      n: () => stepThrough(true), p: () => stepThrough(false),
    };
    section.querySelectorAll(".tools [data-key]").forEach((button) =>
      button.addEventListener("click", () => actions[button.dataset.key]()));
    picture.tabIndex = 0;
    picture.addEventListener("keydown", (event) => {
      if (actions[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
        actions[event.key]();
        event.preventDefault();
      }
    });

    const place = (event) => {
      const lane = picture.querySelector(".lane").getBoundingClientRect();
      return from + (to - from) * (event.clientX - lane.left) / lane.width;
    };
    picture.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
      zoom(event.deltaY < 0 ? 0.8 : 1.25, place(event));
      event.preventDefault();
    }, { passive: false });
    let held = null;
    picture.addEventListener("pointerdown", (event) => {
      if (event.target.closest(".lane svg")) held = place(event);
    });
    window.addEventListener("pointermove", (event) => {
      if (held !== null) show(from + held - place(event), to - from);
    });
    window.addEventListener("pointerup", () => { held = null; });
    window.addEventListener("pointercancel", () => { held = null; });

    picture.addEventListener("pointermove", (event) => {
      const lane = event.target.closest(".lane svg")?.closest("[data-rank]");
      const stretch = lane && stretchAt(lane, span * place(event) / 1000);
      tip.hidden = !stretch;
      if (!stretch) return;
      lane.querySelectorAll("title").forEach((title) => title.remove()); // the browser would show it beside the tip
      tip.textContent = sentence(lane, stretch);
      tip.style.top = `${event.clientY + 16}px`;
      tip.style.left = `${Math.max(4, Math.min(event.clientX, window.innerWidth - tip.offsetWidth - 12))}px`;
    });
    picture.addEventListener("pointerleave", () => { tip.hidden = true; });
    draw();
    return { marks, show };
  };

  const zoomed = [...document.querySelectorAll(".zooms")]
    .filter((section) => section.querySelector(".picture")).map(zoomable);
  const marks = zoomed.flatMap(({ marks: found, show }) => found.map((one) => ({ ...one, show })));

  // From a finding to where it happens.
  document.querySelectorAll("article.finding h3").forEach((head) => {
    const number = head.id.replace("finding-", "");
    const mine = marks.filter(({ mark }) => mark.dataset.finding === number);
    if (!mine.length) return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "show-button";
    button.textContent = "Show in the picture";
    button.addEventListener("click", () => {
      for (const { mark } of marks) mark.classList.toggle("lit", mark.dataset.finding === number);
      const longest = mine.reduce((one, other) => other.width > one.width ? other : one);
      const wide = Math.max(100, 30 * longest.width);
      longest.show(10 * longest.left + 5 * longest.width - wide / 2, wide);
      longest.mark.closest(".rank").scrollIntoView({ block: "center" });
      document.getElementById("picture").focus({ preventScroll: true });
    });
    head.parentElement.append(button);
  });

  if (navigator.clipboard) {
    document.querySelectorAll("article pre").forEach((block) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "copy-button";
      button.textContent = "Copy";
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(block.textContent);
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      });
      block.before(button);
    });
  }

  const search = document.getElementById("search");
  const matches = document.getElementById("matches");
  const items = [...document.querySelectorAll("article.finding, main tbody > tr, .unchecked li, .chart + details li")]
    .filter((item) => !item.parentElement.closest("article.finding"));
  const opened = new Set();
  search.closest("label").hidden = false;
  let hit = -1; // Enter goes from hit to hit
  search.addEventListener("keydown", (event) => {
    const hits = event.key === "Enter" && search.value.trim() ? items.filter((item) => !item.classList.contains("away")) : [];
    if (!hits.length) return;
    hit = (hit + (event.shiftKey ? hits.length - 1 : 1)) % hits.length;
    hits[hit].scrollIntoView({ block: "center" });
    items.forEach((item) => item.classList.toggle("hit", item === hits[hit]));
    matches.textContent = `${hit + 1} of ${hits.length}`;
    event.preventDefault();
  });
  search.addEventListener("input", () => {
    hit = -1;
    const wanted = search.value.trim().toLowerCase();
    for (const fold of opened) fold.open = false;
    opened.clear();
    let count = 0;
    for (const item of items) {
      const fits = !wanted || item.textContent.toLowerCase().includes(wanted);
      item.classList.toggle("away", !fits);
      item.classList.remove("hit");
      if (!wanted || !fits) continue;
      count += 1;
      for (let fold = item.closest("details"); fold; fold = fold.parentElement.closest("details")) {
        if (!fold.open) {
          fold.open = true;
          opened.add(fold);
        }
      }
    }
    matches.textContent = wanted ? `${count} found` : "";
  });
})();
