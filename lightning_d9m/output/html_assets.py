"""Style and script of the page that ``d9m report`` writes; they hold nothing of a ledger."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --page: #fff; --card: #f6f8fa;
  --edge: #d1d9e0; --good: #116329; --bad: #b3261e; --mild: #8a5a00; --line: #0969da; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af; --page: #0d1117;
  --card: #161b22; --edge: #3d444d; --good: #57c46d; --bad: #ff8379; --mild: #e3b341;
  --line: #58a6ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1rem; }
h1 { margin: 0; font-size: 1.8rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; } p { margin: .4rem 0; }
code { font: .86em/1.4 ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }
.verdict { background: var(--card); border: 1px solid var(--edge); border-left-width: 8px;
  border-radius: 6px; padding: 1rem; overflow-wrap: anywhere; }
.verdict.equal { border-left-color: var(--good); } .verdict.equal h1 { color: var(--good); }
.verdict.different { border-left-color: var(--bad); } .verdict.different h1 { color: var(--bad); }
.verdict.not-comparable { border-left-color: var(--mild); }
.verdict.not-comparable h1 { color: var(--mild); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem .8rem; margin: .6rem 0 0; }
dt { color: var(--soft); } dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; border: 1px solid var(--edge); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; min-width: 4rem;
  border-bottom: 1px solid var(--edge); }
td code { display: inline-block; min-width: 9rem; max-width: 24rem; }
td bdi { overflow-wrap: break-word; }
.where { display: inline-block; min-width: 7.5rem; }
tbody tr:last-child td { border-bottom: 0; } th { background: var(--card); white-space: nowrap; }
.lead { font-size: 1.1rem; } .basis { margin-top: .6rem; }
.left-out, .basis, footer, figcaption { color: var(--soft); font-size: .9rem; }
footer { margin: 2rem 0 1rem; }
.filters { display: flex; flex-wrap: wrap; gap: .4rem 1rem; align-items: center;
  margin: .4rem 0; }
input, select { font: inherit; padding: .15rem .4rem; max-width: 100%; color: inherit;
  background: var(--page); border: 1px solid var(--edge); border-radius: 4px; }
figure { margin: .5rem 0 1rem; } svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 11px; } .axis { stroke: var(--edge); }
polyline { fill: none; stroke: var(--line); stroke-width: 2; } circle { fill: var(--line); }
rect.equal { fill: var(--good); } rect.different { fill: var(--bad); }
rect.alone { fill: var(--mild); } .key { white-space: nowrap; margin-left: .6rem; }
.key::before { content: ""; display: inline-block; width: .8em; height: .8em; margin-right: .3em;
  background: var(--good); } .key.different::before { background: var(--bad); }
.key.alone::before { background: var(--mild); }
.mark { stroke: var(--bad); stroke-dasharray: 4 3; }
.tree { list-style: none; margin: 0; padding: .5rem; border: 1px solid var(--edge);
  border-radius: 6px; max-height: 32rem; overflow: auto; position: relative; }
.tree li { padding: .1rem 0 .1rem calc(var(--depth) * 1rem + .6rem);
  border-left: 4px solid transparent; overflow-wrap: anywhere; }
.tree span { color: var(--soft); font-size: .88rem; }
.tree .differs { border-left-color: var(--mild); }
.tree .first { border-left-color: var(--bad); background: var(--card); }
.tree .first strong, .status.different { color: var(--bad); } .status { white-space: nowrap; }
.status.equal { color: var(--good); } .status.only-expected, .status.only-actual {
  color: var(--mild); }
@media (max-width: 500px) { main { padding: .6rem; } svg text { font-size: 17px; }
  th, td { padding: .3rem .4rem; min-width: 3rem; } }
@media print { .tree { max-height: none; overflow: visible; } .scroll { overflow: visible; }
  .filters { display: none; } table { font-size: .7rem; }
  td, td code { overflow-wrap: anywhere; min-width: 0; } tr, figure, li { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""

SCRIPT = """
(function () {
  var first = document.querySelector(".tree .first");
  if (first) first.parentNode.scrollTop = first.offsetTop - 120;
  function make(tag, parent, text) {
    var made = document.createElement(tag);
    if (text) made.textContent = text;
    parent.appendChild(made);
    return made;
  }
  Array.prototype.forEach.call(document.querySelectorAll("table"), function (table) {
    var rows = Array.prototype.map.call(table.tBodies[0].rows, function (row) {
      return { row: row, cells: [] };
    });
    var form = document.createElement("form"), controls = [];
    form.className = "filters";
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (head, column) {
      var how = head.getAttribute("data-filter"), values = [], known = Object.create(null);
      if (!how) return;
      rows.forEach(function (entry) {
        var text = entry.cells[column] = entry.row.cells[column].textContent;
        if (!known[text]) { known[text] = true; values.push(text); }
      });
      if (values.length < 2) return;
      var label = make("label", form, head.textContent + " "), control;
      if (how === "text") {
        control = make("input", label);
        control.type = "search";
      } else {
        control = make("select", label);
        make("option", control, "all").value = "";
        values.forEach(function (text) { make("option", control, text).value = text; });
      }
      controls.push(function (entry) {
        var wanted = control.value, text = entry.cells[column];
        return !wanted || (how === "text"
          ? text.toLowerCase().indexOf(wanted.toLowerCase()) >= 0 : text === wanted);
      });
    });
    if (!controls.length) return;
    var shown = make("output", form);
    function filter() {
      var count = 0;
      rows.forEach(function (entry) {
        var fits = controls.every(function (fit) { return fit(entry); });
        entry.row.hidden = !fits;
        count += fits;
      });
      shown.textContent = count + " of " + rows.length + " shown";
    }
    form.addEventListener("input", filter);
    form.addEventListener("submit", function (event) { event.preventDefault(); });
    table.parentNode.parentNode.insertBefore(form, table.parentNode);
    filter();
  });
})();
"""
