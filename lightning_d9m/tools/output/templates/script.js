(function () {
  Array.prototype.forEach.call(document.querySelectorAll(".filtered"), function (box) {
    var rows = Array.prototype.slice.call(box.querySelectorAll("tbody tr"));
    var label = document.createElement("label"), search = document.createElement("input");
    var shown = document.createElement("output");
    search.type = "search";
    label.className = "filters";
    label.append("rows with these words ", search, shown);
    function filter() {
      var words = search.value.toLowerCase().split(/\s+/), count = 0;
      rows.forEach(function (row) {
        var text = Array.prototype.map.call(row.cells, function (cell) { return cell.textContent; });
        text = text.join(" ").toLowerCase();
        row.hidden = !words.every(function (word) { return text.indexOf(word) >= 0; });
        count += !row.hidden;
      });
      shown.textContent = count + " of " + rows.length + " shown";
    }
    search.addEventListener("input", filter);
    box.parentNode.insertBefore(label, box);
    filter();
  });
})();
