"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  if (!data.trajectories.length) return;
  document.getElementById("viewer").hidden = false;
  const list = document.getElementById("list"), detail = document.getElementById("detail");
  const limits = { context: "ended: the context was full", turn_cap: "ended: a turn reached its token limit", step_cap: "ended: no turn was left", wall_clock: "ended: the time was up" };
  const words = (text) => String(text).replaceAll("_", " ");
  const make = (tag, attributes = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), attributes);
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  };
  const spread = (runs) => runs.flatMap(([value, count]) => Array(count).fill(value));
  for (const trajectory of data.trajectories)
    for (const row of trajectory.rows) { row.m = spread(row.m); row.v = spread(row.v); }

  const fields = [["arm", "all arms"], ["purpose", "train and eval"], ["level", "all levels"], ["family", "all families"], ["kind", "all outcomes"]];
  const picked = {};
  const filters = document.getElementById("filters");
  for (const [field, everything] of fields) {
    const values = [...new Set(data.trajectories.map((trajectory) => trajectory[field]))].filter((value) => value !== null && value !== undefined && value !== "").sort();
    if (values.length < 2) continue;
    const select = make("select", { ariaLabel: field }, make("option", { value: "", textContent: everything }),
      ...values.map((value) => make("option", { value, textContent: field === "level" ? `level ${value}` : words(value) })));
    select.onchange = () => { picked[field] = select.value; fill(); };
    filters.append(select);
  }
  const count = make("span", { className: "count" });
  filters.append(count);

  let shown = [], current = null, mode = "surprise", whole = false;
  function fill() {
    shown = data.trajectories.filter((trajectory) => Object.entries(picked).every(([field, value]) => !value || String(trajectory[field]) === value));
    count.textContent = `${shown.length} of ${data.trajectories.length}`;
    list.replaceChildren(...shown.map((trajectory) => {
      const button = make("button", { type: "button" },
        make("var", { textContent: trajectory.reward === null ? "–" : trajectory.reward.toFixed(2) }),
        make("span", { className: `kind ${trajectory.kind}`, textContent: words(trajectory.kind) }),
        ` ${trajectory.task}`,
        make("small", { textContent: [words(trajectory.arm), trajectory.purpose, trajectory.level ? `level ${trajectory.level}` : null].filter(Boolean).join(" · ") }));
      button.onclick = () => open(trajectory);
      trajectory.button = button;
      return button;
    }));
    if (shown.length) open(shown.includes(current) ? current : shown[0], false);
    else detail.replaceChildren(make("p", { className: "facts", textContent: "No trajectory in the sample fits." }));
  }

  function open(trajectory, remember = true) {
    if (current && current.button) current.button.removeAttribute("aria-current");
    current = trajectory;
    trajectory.button.setAttribute("aria-current", "true");
    // Not scrollIntoView: it would move the page as well.
    const top = trajectory.button.offsetTop - list.offsetTop, bottom = top + trajectory.button.offsetHeight;
    if (top < list.scrollTop) list.scrollTop = top;
    if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
    if (remember) history.replaceState(null, "", `#${trajectory.id}`);
    draw();
    detail.scrollTop = 0;
  }

  function draw() {
    const trajectory = current, readout = make("div", { className: "readout" });
    const versions = trajectory.rows.flatMap((row) => row.v.filter((_, index) => sampled(trajectory, row, index)));
    const trained = trajectory.rows.reduce((sum, row) => sum + row.m.reduce((a, b) => a + b, 0), 0);
    const [oldest, newest] = [Math.min(...versions), Math.max(...versions)];
    const facts = [
      words(trajectory.arm), trajectory.seed !== null && trajectory.seed !== undefined ? `seed ${trajectory.seed}` : null, trajectory.domain, trajectory.family, trajectory.level ? `level ${trajectory.level}` : null,
      trajectory.reward === null ? "no reward" : `reward ${trajectory.reward.toFixed(2)}`, `${trajectory.turns.length} turns`,
      `${trained} trained of ${versions.length} sampled tokens`,
      versions.length ? (oldest === newest ? `policy version ${oldest}` : `policy versions ${oldest} to ${newest}`) : null,
      trajectory.seconds !== null ? `${trajectory.seconds.toFixed(1)} s` : null,
    ];
    const switches = [["surprise", "surprise"], ["version", "policy version"], ["mask", "loss mask"]].map(([value, label]) => {
      const button = make("button", { type: "button", className: "switch", textContent: label, ariaPressed: String(mode === value) });
      button.onclick = () => { mode = value; draw(); };
      return button;
    });
    const all = make("button", { type: "button", className: "switch", textContent: "every token", ariaPressed: String(whole) });
    all.onclick = () => { whole = !whole; draw(); };
    const body = whole
      ? trajectory.rows.map((row, index) => make("div", { className: "turn" },
          make("h4", { textContent: trajectory.rows.length > 1 ? `row ${index + 1} of ${trajectory.rows.length}` : "the whole row, as the trainer sees it" }),
          tokens(trajectory, row, 0, row.t.length, readout)))
      : trajectory.turns.map((turn, index) => make("div", { className: "turn" },
          make("h4", { textContent: `turn ${index + 1} · ${said(trajectory, turn)}` }),
          trajectory.rows[turn.row] ? tokens(trajectory, trajectory.rows[turn.row], turn.start, turn.end, readout) : null,
          turn.tool || turn.result ? make("div", { className: turn.error ? "result error" : "result", textContent: turn.result || "(nothing)" }) : null));
    detail.replaceChildren(...[
      make("h3", {}, make("span", { className: `kind ${trajectory.kind}`, textContent: words(trajectory.kind) }), ` ${trajectory.task}`),
      make("p", { className: "facts", textContent: facts.filter(Boolean).join(" · ") }),
      trajectory.cause ? make("p", { className: "facts", textContent: limits[trajectory.cause] || words(trajectory.cause) }) : null,
      make("div", { className: "asked", textContent: trajectory.instruction }),
      make("ul", { className: "criteria" }, ...trajectory.criteria.map((criterion) =>
        make("li", {}, make("span", { className: `kind ${criterion.met ? "solved" : "failed"}`, textContent: criterion.met ? "✓ " : "✗ " }), `${words(criterion.name)}${criterion.detail ? ` · ${criterion.detail}` : ""}${criterion.gate && !criterion.met ? " · so the reward is 0" : ""}`))),
      make("div", { className: "modes" }, "colour by", ...switches, all),
      ...body, readout].filter(Boolean));
  }

  function said(trajectory, turn) {
    if (turn.tool) return `calls ${turn.tool}`;
    if (turn.result) return "cannot be read";
    return trajectory.kind === "truncated" ? "is cut off" : "answers";
  }

  function sampled(trajectory, row, index) {
    if (!row.own) {
      row.own = Array(row.t.length).fill(false);
      for (const turn of trajectory.turns)
        if (trajectory.rows[turn.row] === row) row.own.fill(true, turn.start, turn.end);
      row.m.forEach((trained, place) => { if (trained) row.own[place] = true; });
    }
    return row.own[index];
  }

  function tokens(trajectory, row, start, end, readout) {
    const box = make("div", { className: "tokens" });
    let version = null;
    for (let index = start; index < end; index++) {
      const mine = sampled(trajectory, row, index), piece = data.pieces[row.t[index]];
      if (mine && row.v[index] !== version) {
        if (version !== null || start === 0) box.append(make("span", { className: "version", textContent: `v${row.v[index]}` }));
        version = row.v[index];
      }
      const node = make("span", { className: mine ? (row.m[index] ? "t" : "t untrained") : "t given", textContent: piece.replaceAll("\n", "⏎\n") });
      if (mine) node.style.background = tint(row, index);
      node.onmouseenter = () => {
        const logprob = row.l[index] / 100;
        readout.textContent = `token ${index} ${JSON.stringify(piece)}` + (mine
          ? `   logprob ${logprob.toFixed(2)}   probability ${Math.exp(logprob).toFixed(2)}   version ${row.v[index]}   ${row.m[index] ? "trained" : "not trained"}`
          : "   given, not sampled");
      };
      box.append(node);
    }
    return box;
  }

  function tint(row, index) {
    if (mode === "mask") return row.m[index] ? "rgba(var(--accent), .22)" : "none";
    if (mode === "version") return `hsla(${(row.v[index] * 67 + 205) % 360}, 55%, 55%, .3)`;
    return `rgba(var(--surprise), ${Math.min(0.8, -row.l[index] / 400).toFixed(3)})`;
  }

  document.addEventListener("keydown", (event) => {
    const step = { j: 1, k: -1 }[event.key] ?? (document.activeElement === list || list.contains(document.activeElement) ? { ArrowDown: 1, ArrowUp: -1 }[event.key] : undefined);
    if (!step || event.target.tagName === "SELECT" || event.metaKey || event.ctrlKey) return;
    const next = shown[shown.indexOf(current) + step];
    if (next) { open(next); event.preventDefault(); }
  });

  current = data.trajectories.find((trajectory) => `#${trajectory.id}` === location.hash) || null;
  fill();
})();
