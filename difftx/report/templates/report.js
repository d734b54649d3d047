// Tooltips of the figures, by pointer, finger or arrow keys, legends that hide lines, and tables of the values.
const MOST_LINES = 8;  // The tooltip of a figure with more lines has only the nearest ones.
const MOST_ROWS = 12;  // The table of a figure with lines has at most this many rows.
const MAKE = (tag, text = "", colour = null) => {
  const element = document.createElement(tag);
  element.textContent = text;
  if (colour) { element.className = "run"; element.style.setProperty("--run", colour); }
  return element;
};
const DRAW = (tag, attributes) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};
const number = value => value === null ? "–" : Number(value).toLocaleString("en", { maximumSignificantDigits: 5 });

for (const figure of document.querySelectorAll(".figure")) {
  const svg = figure.querySelector("svg"), tip = figure.querySelector(".tip"), marks = DRAW("g", { class: "marks" });
  const data = JSON.parse(figure.querySelector("script").textContent), [left, top, right, bottom] = data.box;
  const hidden = new Set();
  let at = null;  // The index of a heatmap's cell or of an x.
  svg.append(marks);

  // Positions of a value along an axis, in units of the SVG.
  const along = (value, axis, from, to) => {
    const scale = data.log[axis] ? Math.log : x => x, [low, high] = data.limits.slice(2 * axis, 2 * axis + 2).map(scale);
    return from + (scale(value) - low) / (high - low) * (to - from);
  };
  const px = x => along(x, 0, left, right), py = y => along(y, 1, bottom, top);
  const lines = () => data.lines.filter((_, index) => !hidden.has(index));
  const nearest = (line, x) => line.x.reduce((best, other, i) => Math.abs(px(other) - x) < Math.abs(px(line.x[best]) - x) ? i : best, 0);

  const show = (x, y, rows) => {
    tip.replaceChildren(...rows.map(([colour, text]) => MAKE("div", text, colour)));
    tip.hidden = false;
    const { width, height } = figure.getBoundingClientRect(), scale = width / svg.viewBox.baseVal.width;
    const room = width - tip.offsetWidth;
    const beside = x * scale + 12 > room ? x * scale - 12 - tip.offsetWidth : x * scale + 12;
    tip.style.left = `${Math.max(0, Math.min(room, beside))}px`;
    tip.style.top = `${Math.max(0, Math.min(height - tip.offsetHeight, y * scale - tip.offsetHeight / 2))}px`;
  };
  const showLines = (x, y) => {
    const points = lines().filter(line => line.x.length).map(line => ({ line, i: nearest(line, x) }))
      .map(({ line, i }) => ({ line, x: line.x[i], y: line.y[i] })).filter(point => point.y !== null);
    const near = Math.min(...points.map(point => Math.abs(px(point.x) - x)));
    let shown = points.filter(point => Math.abs(px(point.x) - x) < near + 8);
    if (shown.length > MOST_LINES) shown = shown.sort((a, b) => Math.abs(py(a.y) - y) - Math.abs(py(b.y) - y)).slice(0, MOST_LINES);
    if (!shown.length) return;
    marks.replaceChildren(DRAW("line", { x1: px(shown[0].x), x2: px(shown[0].x), y1: top, y2: bottom, stroke: "currentColor", "stroke-opacity": .4 }),
      ...shown.map(point => DRAW("circle", { cx: px(point.x), cy: py(point.y), r: 4, fill: point.line.colour })));
    show(px(shown[0].x), y, [[null, number(shown[0].x)], ...shown.map(point => [point.line.colour, `${point.line.name}: ${number(point.y)}`])]);
  };
  const cell = [(right - left) / (data.x || [0]).length, (bottom - top) / (data.y || [0]).length];
  const showCell = (column, row) => {
    const x = left + column * cell[0], y = top + row * cell[1];
    marks.replaceChildren(DRAW("rect", { x, y, width: cell[0], height: cell[1], fill: "none", stroke: "currentColor", "stroke-width": 2 }));
    show(x + cell[0], y, [[null, `${data.x[column]}, ${data.y[row]}`], ...(data.values.length ? [[null, number(data.values[row][column])]] : [])]);
  };
  const clear = () => { tip.hidden = true; marks.replaceChildren(); };
  const move = event => {
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    if (x < left - 4 || x > right + 4 || y < top - 4 || y > bottom + 4) return clear();
    if (data.lines) return showLines(x, y);
    const within = (value, count) => Math.max(0, Math.min(count - 1, Math.floor(value)));
    showCell(within((x - left) / cell[0], data.x.length), within((y - top) / cell[1], data.y.length));
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", event => event.pointerType === "mouse" && clear());
  figure.addEventListener("blur", clear);
  figure.addEventListener("keydown", event => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-1e9, 0], End: [1e9, 0] }[event.key];
    if (event.key === "Escape") return clear();
    if (!step) return;
    event.preventDefault();
    const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));
    if (!data.lines) {
      at = at ? [clamp(at[0] + step[0], data.x.length), clamp(at[1] + step[1], data.y.length)] : [0, 0];
      return showCell(...at);
    }
    const xs = [...new Set(lines().flatMap(line => line.x))].sort((a, b) => a - b);
    at = at === null ? 0 : clamp(at + step[0] + step[1], xs.length);
    if (xs.length) showLines(px(xs[at]), (top + bottom) / 2);
  });

  // The value of a line at x, or null before the line begins and after its end.
  const valueAt = (line, x) => {
    const xs = line.x.map(px), margin = (Math.max(...xs) - Math.min(...xs)) / Math.max(xs.length - 1, 1) / 2;
    return x >= Math.min(...xs) - margin && x <= Math.max(...xs) + margin ? line.y[nearest(line, x)] : null;
  };
  // Rows of texts, of which the first is the header. The rows of lines are at evenly spaced points of the first line.
  const rows = () => {
    if (!data.lines) return [[data.labels.toReversed().join(" \\ "), ...data.x], ...data.values.map((row, i) => [data.y[i], ...row.map(number)])];
    const xs = data.lines[0].x, count = Math.min(xs.length, MOST_ROWS);
    const shown = [...Array(count).keys()].map(i => xs[Math.round(i * (xs.length - 1) / Math.max(count - 1, 1))]);
    return [[data.labels[0], ...data.lines.map(line => line.name)], ...shown.map(x => [number(x), ...data.lines.map(line => number(valueAt(line, px(x))))])];
  };
  figure.parentElement.querySelector(".values")?.addEventListener("toggle", event => {
    const box = MAKE("div"), table = MAKE("table");
    box.className = "wide";
    box.tabIndex = 0;
    table.className = "numbers";
    const [header, ...others] = rows().map((texts, row) => {
      const made = document.createElement("tr");
      made.append(...texts.map((text, column) => MAKE(row && column ? "td" : "th", text)));
      return made;
    });
    table.createTHead().append(header);
    table.createTBody().append(...others);
    box.append(table);
    event.target.append(box);
  }, { once: true });
  for (const button of figure.parentElement.querySelectorAll(".legend button"))
    button.addEventListener("click", () => {
      const isShown = button.getAttribute("aria-pressed") === "false";
      button.setAttribute("aria-pressed", isShown);
      for (const index of button.dataset.lines.split(" ").map(Number)) {
        hidden[isShown ? "delete" : "add"](index);
        for (const line of svg.querySelectorAll(`.series-${index}`)) line.style.display = isShown ? "" : "none";
      }
      clear();
    });
}
