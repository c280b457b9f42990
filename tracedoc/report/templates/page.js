// Zoom into the picture of the step, and copy fixes. The page reads the same without it.
(() => {
  "use strict";
  document.documentElement.classList.add("scripted");

  const picture = document.getElementById("picture");
  if (picture) {
    const span = Number(picture.dataset.span);
    const drawings = [...picture.querySelectorAll("svg")];
    const marks = [...picture.querySelectorAll(".mark")].map((mark) => ({
      mark, left: parseFloat(mark.style.left), width: parseFloat(mark.style.width),
    }));
    const axis = picture.querySelector(".axis");
    const shown = document.getElementById("shown");
    let from = 0;
    let to = 1000;

    const milliseconds = (value) =>
      value < 0.0995 && value > 0 ? `${(1000 * value).toPrecision(3)} us` : `${Number(value.toPrecision(4))} ms`;

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
          tick.textContent = milliseconds(Number(at.toPrecision(12)));
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

    const actions = {
      "+": () => zoom(0.5), "-": () => zoom(2), "0": () => show(0, 1000),
      ArrowLeft: () => pan(-0.25), ArrowRight: () => pan(0.25),
    };
    document.querySelectorAll(".tools [data-key]").forEach((button) =>
      button.addEventListener("click", () => actions[button.dataset.key]()));
    picture.tabIndex = 0;
    picture.addEventListener("keydown", (event) => {
      if (actions[event.key] && !event.ctrlKey && !event.metaKey) {
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
    draw();
  }

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
})();
