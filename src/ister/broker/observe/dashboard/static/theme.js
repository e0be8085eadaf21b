// Sets the chosen theme before anything is drawn; see settings.js. Not a module, since those run late.
(() => {
  try {
    const theme = localStorage.getItem("ister.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // A browser that keeps nothing has the theme of the system.
  }
})();
