(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  document.body.append(tip);
  const hide = () => { tip.style.display = "none"; };
  const show = (text, event) => {
    if (!text) return hide();
    tip.textContent = text;
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(innerWidth - box.width - 8, event.clientX + 14)) + "px";
    tip.style.top = (event.clientY + box.height + 24 > innerHeight ? event.clientY - box.height - 12 : event.clientY + 16) + "px";
  };
  const parsed = new WeakMap();
  const data = (node, key) => {
    if (!parsed.has(node)) parsed.set(node, JSON.parse(node.dataset[key]));
    return parsed.get(node);
  };
  const nearest = (points, x) => points.reduce((best, p) => Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best, points[0]);
  const chart = (svg, event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const found = data(svg, "tip").filter(s => s.p.length).map(s => [s.n, nearest(s.p, x)]);
    if (found.length) show([found[0][1][2], ...found.map(([n, p]) => (n ? n + "  " : "") + p[3])].join("\n"), event);
  };
  const cells = (strip, event) => {
    const box = strip.getBoundingClientRect();
    const words = data(strip, "cells");
    show(words[Math.min(words.length - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * words.length)))], event);
  };
  document.addEventListener("pointermove", event => {
    const node = event.target.closest ? event.target.closest("[data-tip],[data-cells]") : null;
    if (!node) return hide();
    (node.dataset.tip ? chart : cells)(node, event);
  });
  addEventListener("scroll", hide, { passive: true });
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.querySelectorAll("th")];
    const value = (row, i) => {
      const cell = row.cells[i];
      return cell.dataset.v === undefined ? cell.textContent : cell.dataset.v === "" ? -Infinity : Number(cell.dataset.v);
    };
    const sort = (head, i) => {
      const up = head.getAttribute("aria-sort") === "descending";
      heads.forEach(h => h.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [value(a, i), value(b, i)];
        return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
      });
      table.tBodies[0].append(...rows);
    };
    heads.forEach((head, i) => {
      head.setAttribute("aria-sort", "none");
      head.tabIndex = 0;
      head.addEventListener("click", () => sort(head, i));
      head.addEventListener("keydown", event => { if (event.key === "Enter") sort(head, i); });
    });
  }
  for (const bar of document.querySelectorAll(".filters")) {
    const items = [...bar.nextElementSibling.children];
    const by = [...bar.querySelectorAll("select")];
    const filter = () => {
      const shown = items.filter(item => !(item.hidden = by.some(s => s.value && item.dataset[s.dataset.by] !== s.value)));
      bar.querySelector("output").textContent = shown.length + " of " + items.length;
    };
    by.forEach(s => s.addEventListener("change", filter));
    bar.hidden = false;
    filter();
    const open = () => {
      const item = items.find(each => "#" + each.id === location.hash);
      if (!item) return;
      by.forEach(s => { s.value = ""; });
      filter();
      item.open = true;
      item.scrollIntoView();
    };
    addEventListener("hashchange", open);
    open();
  }
})();
