/* Draws the figures from the page's data, in the page's colours, and again whenever these or the width change. */
(() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const hidden = new Map(Object.keys(figures).map((id) => [id, new Set()]));
  const paper = matchMedia("print");
  const DECADES = { type: "log", exponentformat: "power" };
  const PAPER_WIDTH = 660; // fits A4 and letter between the margins of the stylesheet

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const isPrinting = () => paper.matches || "print" in document.documentElement.dataset;

  /* Plotly reads some HTML in texts; a name is never meant as such. */
  const literal = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const wrapped = (text, width) =>
    (text.match(new RegExp(`.{1,${width}}(?:\\s+|$)|.{${width}}`, "gu")) || [text]).map(literal).join("<br>");

  function number(value) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e15)) return value.toExponential(3);
    return value.toLocaleString("en", size < 1e4 ? { maximumSignificantDigits: 5 } : { maximumFractionDigits: 0 });
  }

  function faded(hex, alpha) {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  }

  function hoverText(figure, curve, i) {
    const range =
      curve.low && curve.high && curve.low[i] !== null && curve.high[i] !== null
        ? ` (${number(curve.low[i])} to ${number(curve.high[i])})`
        : "";
    const value = curve.y[i] === null ? "not finite" : number(curve.y[i]) + range;
    return `<b>${wrapped(curve.label, 36)}</b><br>${wrapped(figure.x_title, 36)}: ${number(curve.x[i])}<br>${wrapped(figure.y_title, 36)}: ${value}`;
  }

  function line(figure, curve, visible) {
    const colour = css(`--c${curve.colour}`);
    return {
      type: "scatter",
      mode: curve.published && curve.x.length > 1 ? "lines" : "lines+markers",
      name: literal(curve.label),
      x: curve.x,
      y: curve.y,
      text: curve.x.map((_, i) => hoverText(figure, curve, i)),
      hovertemplate: "%{text}<extra></extra>",
      hoverlabel: { bordercolor: colour },
      line: { color: colour, width: 2, dash: curve.published ? "dash" : "solid" },
      marker: { color: colour, size: 7, symbol: curve.symbol, maxdisplayed: 12 },
      visible,
    };
  }

  /* The range over seeds: a closed shape for each stretch without a gap. */
  function band(figure, curve, visible) {
    const x = [];
    const y = [];
    const isSet = (value) => value !== null && (value > 0 || !figure.log_y); // a logarithmic axis has no zero
    const isThere = (i) => i < curve.x.length && isSet(curve.low[i]) && isSet(curve.high[i]);
    for (let start = 0; start < curve.x.length; start += 1) {
      if (!isThere(start)) continue;
      let end = start;
      while (isThere(end + 1)) end += 1;
      const there = Array.from({ length: end - start + 1 }, (_, k) => start + k);
      const back = [...there].reverse();
      x.push(...there.map((i) => curve.x[i]), ...back.map((i) => curve.x[i]), null);
      y.push(...there.map((i) => curve.high[i]), ...back.map((i) => curve.low[i]), null);
      start = end;
    }
    return {
      type: "scatter",
      mode: "lines",
      x,
      y,
      fill: "toself",
      fillcolor: faded(css(`--c${curve.colour}`), css("--band")),
      line: { width: 0 },
      hoverinfo: "skip",
      visible,
    };
  }

  function traces(id) {
    const figure = figures[id];
    const shown = (i) => !hidden.get(id).has(i);
    const bands = figure.curves.flatMap((curve, i) => (curve.low && curve.high ? [band(figure, curve, shown(i))] : []));
    return [...bands, ...figure.curves.map((curve, i) => line(figure, curve, shown(i)))];
  }

  /* How far apart labels are: powers of ten; where heights span fewer than two of these, at twice and five times, too. */
  function logStep(figure) {
    const heights = figure.curves.flatMap((curve) => [...curve.y, ...(curve.low || []), ...(curve.high || [])]);
    const logs = heights.filter((value) => value !== null && value > 0).map(Math.log10);
    const span = logs.reduce((a, b) => Math.max(a, b), -Infinity) - logs.reduce((a, b) => Math.min(a, b), Infinity);
    return span < 2 ? "D2" : Math.max(1, Math.round(span / 7));
  }

  /* Over fewer than two powers of ten there may be none to label: then a few points, such as batch sizes, are labelled. */
  function logTicks(figure) {
    const points = [...new Set(figure.curves.flatMap((curve) => curve.x))].filter((value) => value > 0);
    const isShort = points.length <= 8 && Math.max(...points) < 100 * Math.min(...points);
    return isShort ? { type: "log", tickvals: points } : { ...DECADES, dtick: 1 };
  }

  function layout(figure, width) {
    const ink = css("--soft");
    const axis = {
      automargin: true,
      color: ink,
      gridcolor: css("--grid"),
      linecolor: css("--rule"),
      zeroline: false,
      separatethousands: true,
    };
    return {
      width,
      height: width < 520 ? 290 : 380,
      margin: { l: 44, r: 14, t: 10, b: 44 },
      font: { family: css("--font"), size: 13, color: ink },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: { ...axis, title: { text: wrapped(figure.x_title, 60), standoff: 10, font: { size: 13 } }, showgrid: false, showline: true, exponentformat: "SI", ticks: "outside", nticks: width < 520 ? 5 : 9, ...(figure.log_x ? logTicks(figure) : {}) },
      yaxis: { ...axis, exponentformat: "power", nticks: 7, ...(figure.log_y ? { ...DECADES, dtick: logStep(figure) } : {}) },
      showlegend: false,
      hovermode: "closest",
      hoverdistance: 24,
      hoverlabel: { bgcolor: css("--surface"), font: { family: css("--font"), size: 13, color: css("--ink") }, align: "left" },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
      uirevision: "keep", // a zoom outlives a change of colours
    };
  }

  function draw(id) {
    const plot = document.querySelector(`#${id} .chart`);
    const width = isPrinting() ? PAPER_WIDTH : plot.clientWidth;
    const config = { displayModeBar: false, responsive: false, plotlyServerURL: "" };
    Plotly.react(plot, traces(id), layout(figures[id], width), config);
  }

  /* What is folded away has no width to be drawn at: it is drawn when it is unfolded. */
  const isShown = (id) => !document.querySelector(`#${id}`).closest("details:not([open])");
  const drawAll = () => Object.keys(figures).filter(isShown).forEach(draw);

  function toggle(id, button) {
    const curve = Number(button.dataset.curve);
    const set = hidden.get(id);
    if (!set.delete(curve)) set.add(curve);
    button.setAttribute("aria-pressed", String(!set.has(curve)));
    draw(id);
  }

  for (const id of Object.keys(figures)) {
    for (const button of document.querySelectorAll(`#${id} .key`)) {
      button.addEventListener("click", () => toggle(id, button));
    }
  }

  /* On paper: light, at the paper's width, with the settings unfolded. */
  const folded = new Set();
  function prepare(printing) {
    document.documentElement.toggleAttribute("data-print", printing);
    for (const details of document.querySelectorAll("details.settings")) {
      if (printing && !details.open) folded.add(details);
      if (folded.has(details)) details.open = printing;
    }
    if (!printing) folded.clear();
    drawAll();
  }
  addEventListener("beforeprint", () => prepare(true));
  addEventListener("afterprint", () => prepare(false));
  paper.addEventListener("change", (event) => prepare(event.matches));

  for (const details of document.querySelectorAll("details.whole")) {
    details.addEventListener("toggle", () => [...details.querySelectorAll("figure")].map((f) => f.id).filter(isShown).forEach(draw));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar changes the height alone
    width = innerWidth;
    drawAll();
  });
  drawAll();
})();
