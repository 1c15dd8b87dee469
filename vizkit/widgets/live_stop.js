// A Stop button. Where the kernel does not take the press within two seconds, because it hears nothing while a cell
// runs, the kernel is interrupted, as its own stop button does.
const PATIENCE_MS = 2000;

export default {
  render({ model, el }) {
    let timer;
    const button = document.createElement("button");
    button.textContent = "Stop the run";
    button.className = "jp-Button jp-mod-styled jp-mod-warn vk-live-stop";
    button.title = "Ends all ranks after the step that they are in; the kernel's own stop button works too";
    button.addEventListener("click", () => {
      button.disabled = true;
      button.textContent = "Stopping…";
      model.set("pressed", true);
      model.save_changes();
      timer = setTimeout(() => model.widget_manager?.kernel?.interrupt?.(), PATIENCE_MS);
    });
    model.on("msg:custom", (message) => message === "heard" && clearTimeout(timer));
    el.appendChild(button);
    return () => clearTimeout(timer);  // the run is over
  },
};
