// Requests below the address with the token, and the state of a view in the part of the address after #.

export async function get(name, parameters = {}, method = "GET") {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value != null));
  const response = await fetch(`api/${name}?${query}`, { method });
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}

export function route() {
  const [view, query] = location.hash.slice(1).split("?");
  return { view, given: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

export function address(view, given) {
  const query = new URLSearchParams(Object.entries(given).filter(([, value]) => value !== "" && value != null));
  return `#${view}?${query}`;
}

export function go(view, given) {
  location.hash = address(view, given);
}
