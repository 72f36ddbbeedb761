'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const hue = n => (n * 137.508) % 360;  // neighbours differ by the golden angle
const colour = (n, alpha = 1) => `hsla(${hue(n)},65%,52%,${alpha})`;
const dark = () => matchMedia('(prefers-color-scheme: dark)').matches;

const short = v => v === null ? '' : v !== 0 && Math.abs(v) < 1e-3 ? v.toExponential(1) : v.toLocaleString('en', {maximumSignificantDigits: 4});

// ---------------------------------------------------------------- curves
const plots = [];
const range = (u, low, high) => low === null ? [0, 1] : low === high ? [low - .5, high + .5] : uPlot.rangeNum(low, high, .1, true);
function curve(spec) {
  const lines = spec.lines.filter(line => line.values.some(v => v !== null));
  if (!lines.length) return;
  const box = document.createElement('div'), title = document.createElement('h3'), note = document.createElement('p');
  box.className = 'plot'; note.className = 'note';
  title.textContent = spec.title; note.textContent = spec.note;
  box.append(title, note);
  document.querySelector(spec.more ? '#more .grid' : '#curves').append(box);
  const series = [{label: 'step'}], values = [spec.steps], bands = [];
  const several = data.runs.length > 1, met = data.runs.map(() => 0);
  lines.forEach((line, n) => {  // of several runs each has a colour, and its second metric is dashed
    const i = several ? line.run : n, dash = several && met[line.run]++ ? [5, 4] : undefined;
    series.push({label: line.label, stroke: colour(i + 1), width: 1.5, spanGaps: true, dash,
                 points: {show: spec.steps.length < 40}, value: (u, v) => v === null ? '-' : v});
    values.push(line.values);
    if (line.low) {
      for (const edge of ['high', 'low']) {
        series.push({label: line.label + ' ' + edge, stroke: colour(i + 1, .25), width: .5, spanGaps: true, points: {show: false}});
        values.push(line[edge]);
      }
      bands.push({series: [series.length - 2, series.length - 1], fill: colour(i + 1, .15)});
    }
  });
  const axis = () => ({stroke: css('--fg'), grid: {stroke: css('--line'), width: .5}, ticks: {stroke: css('--line')}});
  const plot = new uPlot({width: Math.max(200, box.clientWidth - 16), height: 190, series, bands, scales: {x: {time: false, range: (u, low, high) => low === high ? [low - 1, high + 1] : [low, high]}, y: {range}},
                          axes: [axis(), {...axis(), size: 62, values: (u, ticks) => ticks.map(short)}], legend: {show: true}}, values, box);
  plot.root.querySelectorAll('.u-series').forEach((row, i) => { if (/ (low|high)$/.test(series[i].label)) row.hidden = true; });
  const newest = () => plot.setLegend({idx: spec.steps.length - 1});  // where no point is pointed at
  setTimeout(newest);
  plot.over.addEventListener('mouseleave', () => setTimeout(newest));
  plot.over.addEventListener('click', () => {
    const i = plot.cursor.idx;
    if (i === null || i === undefined) return;
    const away = line => line.values[i] === null ? Infinity : Math.abs(plot.valToPos(line.values[i], 'y') - plot.cursor.top);
    const nearest = lines.reduce((a, b) => away(b) < away(a) ? b : a);
    openSample(nearest.run, spec.steps[i]);
  });
  plots.push([plot, box]);
}

// ---------------------------------------------------------------- samples
function openSample(run, step) {  // of this step, or of the nearest that has one
  const all = [...document.querySelectorAll(`details[data-run="${run}"][data-step]`)];
  if (!all.length) return;
  const found = all.reduce((a, b) => Math.abs(b.dataset.step - step) < Math.abs(a.dataset.step - step) ? b : a);
  found.open = true;
  found.scrollIntoView({block: 'center'});
  found.querySelector('summary').focus({preventScroll: true});
}
function showTokens(place) {
  const [texts, advantages, gaps] = data.tokens[place.dataset.run][place.dataset.view];
  const most = values => Math.max(1e-9, ...values.map(v => Math.abs(v ?? 0)));
  const advantage = most(advantages), gap = Math.max(.01, most(gaps)), tip = document.createElement('span');
  const note = document.createElement('span');
  note.className = 'note'; tip.className = 'tip';
  note.textContent = 'By token: green has a positive advantage, red a negative one; the line below is the gap of the log-probs, trainer - engine. ';
  place.append(note);
  texts.forEach((text, i) => {
    const span = document.createElement('bdi'), said = [`token ${i}`];
    span.textContent = text === '' ? '\u2205' : text.replaceAll('\n', '\u21b5\n');
    if (advantages[i] === null) { span.style.opacity = .6; said.push('observed, not sampled'); }
    else {
      span.style.background = `hsla(${advantages[i] < 0 ? 0 : 130},70%,45%,${(.4 * Math.abs(advantages[i]) / advantage).toFixed(2)})`;
      said.push(`advantage ${short(advantages[i])}`);
    }
    if (gaps[i] !== null) {
      span.style.borderBottom = `3px solid hsla(260,80%,60%,${Math.min(1, Math.abs(gaps[i]) / gap).toFixed(2)})`;
      said.push(`gap ${short(gaps[i])} nats`);
    }
    span.title = said.join(', ');
    span.addEventListener('click', () => { tip.textContent = ' ' + JSON.stringify(text) + ': ' + span.title; });
    place.append(span);
  });
  place.append(tip);
}
document.addEventListener('toggle', e => {
  for (const place of e.target.querySelectorAll('.tokens:empty')) showTokens(place);
}, true);

// ---------------------------------------------------------------- canvases
function canvas(element, height) {
  const ratio = devicePixelRatio || 1, width = element.clientWidth;
  element.width = width * ratio; element.height = height * ratio; element.style.height = height + 'px';
  const pen = element.getContext('2d');
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = '11px system-ui'; pen.textBaseline = 'middle';
  return [pen, width];
}

const LEFT = 62, FOOT = 20, LEVELS = 16, LOADING = -1, DOWN = -2;
class Timeline {
  constructor(element, spec) {
    this.element = element; this.spec = spec;
    this.from = 0; this.to = Math.max(1, spec.end);
    this.row = Math.max(8, Math.min(34, 640 / (spec.instances.length + 1)));
    this.lanes = [{name: 'trainer', bars: spec.trainer}, ...spec.instances.map(lane => ({name: 'inst ' + lane.id, id: lane.id, bars: lane.bars}))];
    this.tip = element.nextElementSibling;
    element.addEventListener('wheel', e => { e.preventDefault(); this.zoom(e.offsetX, e.deltaY > 0 ? 1.25 : .8); }, {passive: false});
    element.addEventListener('pointerdown', e => { this.held = e.offsetX; element.setPointerCapture(e.pointerId); });
    element.addEventListener('pointerup', () => { this.held = undefined; });
    element.addEventListener('pointermove', e => this.held === undefined ? this.tell(e) : this.shift(e));
    element.addEventListener('dblclick', () => { this.from = 0; this.to = Math.max(1, spec.end); this.draw(); });
    this.draw();
  }
  x(ms) { return LEFT + (ms - this.from) / (this.to - this.from) * (this.width - LEFT); }
  at(x) { return this.from + (x - LEFT) / (this.width - LEFT) * (this.to - this.from); }
  zoom(x, factor) {
    const centre = this.at(x);
    this.from = Math.max(0, centre - (centre - this.from) * factor);
    this.to = Math.min(Math.max(1, this.spec.end), centre + (this.to - centre) * factor);
    this.draw();
  }
  shift(e) {
    const by = this.at(this.held) - this.at(e.offsetX), span = this.to - this.from;
    this.from = Math.min(Math.max(0, this.from + by), Math.max(0, this.spec.end - span)); this.to = this.from + span;
    this.held = e.offsetX; this.draw();
  }
  tell(e) {
    const lane = this.lanes[Math.floor(e.offsetY / this.row)], ms = this.at(e.offsetX);
    const bar = lane && lane.bars.find(b => b[0] <= ms && ms < b[1]);
    if (!bar) { this.tip.textContent = ''; return; }
    const what = bar[2] === LOADING ? 'loads weights' : bar[2] === DOWN ? 'is down' : !bar[3].length ? 'is idle' + this.cause(lane, ms)
      : lane.id === undefined ? `trains version ${bar[3][0][0]}` : bar[3].map(([v, n]) => `version ${v}: ${n} samples`).join(', ');
    this.tip.textContent = `${lane.name} ${what}, ${(bar[0] / 1e3).toFixed(2)} to ${(bar[1] / 1e3).toFixed(2)} s`;
  }
  cause(lane, ms) {  // what held longest in the step that this moment belongs to
    const step = this.spec.steps.find(([published]) => published >= ms);
    const said = step === undefined ? '' : this.spec.waits[step[1]] || '';
    const found = said.match(lane.id === undefined ? /trainer idle \d+%: (waiting for [^;]+)/ : /rollouts idle \d+%: (waiting for [^;]+)/);
    return found ? `, ${found[1]} (step ${step[1]})` : '';
  }
  draw() {
    const [pen, width] = canvas(this.element, this.row * this.lanes.length + FOOT);
    this.width = width;
    this.lanes.forEach((lane, i) => this.lane(pen, lane, i));
    pen.strokeStyle = css('--fg'); pen.globalAlpha = .35; pen.lineWidth = .7;
    const place = new Map(this.lanes.map((lane, i) => [lane.id, (i + .5) * this.row]));
    for (const [ms, src, dst] of this.spec.moves) {
      if (ms < this.from || ms > this.to || !place.has(src) || !place.has(dst)) continue;
      const x = this.x(ms), down = Math.sign(place.get(dst) - place.get(src)) * 4;
      pen.beginPath(); pen.moveTo(x, place.get(src)); pen.lineTo(x, place.get(dst));
      pen.lineTo(x - 2.5, place.get(dst) - down); pen.moveTo(x, place.get(dst)); pen.lineTo(x + 2.5, place.get(dst) - down); pen.stroke();
    }
    pen.globalAlpha = 1; pen.setLineDash([4, 3]);
    for (const ms of this.spec.restarts) { pen.beginPath(); pen.moveTo(this.x(ms), 0); pen.lineTo(this.x(ms), this.row * this.lanes.length); pen.stroke(); }
    pen.setLineDash([]); pen.fillStyle = css('--fg');
    for (let k = 0; k <= 4; k++) {
      const ms = this.from + (this.to - this.from) * k / 4;
      pen.textAlign = k === 0 ? 'left' : k === 4 ? 'right' : 'center';
      pen.fillText((ms / 1e3).toFixed(1) + ' s', this.x(ms), this.row * this.lanes.length + FOOT / 2);
    }
  }
  lane(pen, lane, i) {
    const inner = this.row - 2, top = i * this.row;
    for (const [a, b, fill, versions] of lane.bars) {
      if (b < this.from || a > this.to) continue;
      const x = Math.max(LEFT, this.x(a)), w = Math.max(.5, Math.min(this.width, this.x(b)) - x);
      pen.fillStyle = css('--line');
      if (fill === DOWN) pen.fillStyle = dark() ? '#000' : '#222';
      pen.fillRect(x, top, w, inner);
      if (fill === LOADING) { pen.fillStyle = colour(0, .35); for (let s = x; s < x + w; s += 4) pen.fillRect(s, top, Math.min(2, x + w - s), inner); }
      const all = versions.reduce((sum, [, n]) => sum + n, 0);
      let bottom = top + inner;
      for (const [version, n] of versions) {
        const h = inner * (fill / LEVELS) * n / all;
        pen.fillStyle = colour(version); pen.fillRect(x, bottom - h, w, h); bottom -= h;
        if (inner > 11 && w > 22) { pen.fillStyle = '#fff'; pen.textAlign = 'left'; pen.fillText(version, x + 3, top + inner / 2); }
      }
    }
    pen.fillStyle = css('--bg'); pen.fillRect(0, top, LEFT - 2, this.row);
    if (i % Math.ceil(12 / this.row)) return;  // names that would overlap
    pen.fillStyle = css('--fg'); pen.textAlign = 'left'; pen.fillText(lane.name, 2, top + inner / 2);
  }
}

function lags(element, spec) {
  const height = 150, base = height - FOOT, [pen, width] = canvas(element, height);
  const n = spec.steps.length, w = (width - LEFT) / Math.max(1, n);
  spec.shares.forEach((shares, i) => {
    let bottom = base;
    shares.forEach((share, k) => {
      const h = share * (base - 4);
      pen.fillStyle = colour(spec.lags[k] + 1); pen.fillRect(LEFT + i * w, bottom - h, Math.max(.6, w - .4), h); bottom -= h;
    });
  });
  pen.textAlign = 'left';
  spec.lags.forEach((lag, k) => {
    pen.fillStyle = colour(lag + 1); pen.fillRect(4, 6 + 16 * k, 10, 10);
    pen.fillStyle = css('--fg'); pen.fillText('lag ' + lag, 18, 11 + 16 * k);
  });
  pen.fillStyle = css('--fg');
  if (n) { pen.fillText('step ' + spec.steps[0], LEFT, height - 9); pen.textAlign = 'right'; pen.fillText('step ' + spec.steps[n - 1], width - 2, height - 9); }
}

data.curves.filter(spec => !spec.more).forEach(curve);
const more = document.getElementById('more'), folded = data.curves.filter(spec => spec.more && spec.lines.some(line => line.values.some(v => v !== null)));
if (!folded.length) more.hidden = true;
more.addEventListener('toggle', () => { folded.splice(0).forEach(curve); redraw(); });  // a plot is as wide as its place, which is there once it is open
const timelines = [...document.querySelectorAll('canvas.timeline')].map(e => new Timeline(e, data.timelines[e.dataset.run]));
const drawLags = () => document.querySelectorAll('canvas.lags').forEach(e => lags(e, data.lags[e.dataset.run]));
drawLags();
function redraw() {
  for (const [plot, box] of plots) plot.setSize({width: Math.max(200, box.clientWidth - 16), height: 190});
  timelines.forEach(t => t.draw()); drawLags();
}
addEventListener('resize', redraw);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => location.reload());
const asked = location.hash.match(/^#run=(\d+)&step=(\d+)$/);  // a link to a sample
if (asked) openSample(asked[1], +asked[2]);
