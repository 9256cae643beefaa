(function () {
  var first = document.querySelector(".heat-map .first");
  if (first) first.closest(".heat-map").scrollTop = first.offsetTop - 120;
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
