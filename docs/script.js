/* Open the groups that hold what the reader searched for: the search adds its words as ?h=. */
(function () {
  var words = (new URLSearchParams(location.search).get("h") || "").toLowerCase().split(/\s+/);
  document.querySelectorAll("details").forEach(function (group) {
    var text = group.textContent.toLowerCase();
    if (words.some(function (word) { return word && text.indexOf(word) >= 0; })) group.open = true;
  });
})();
