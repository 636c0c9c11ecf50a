// Shows the OpenAPI document with Swagger UI. Addresses are relative, so that the page works behind
// a proxy that strips a path prefix. Nothing is requested from other hosts. A key is kept in memory
// until the page is closed.

const form = document.getElementById("key-form");

async function show(key) {
  const response = await fetch("openapi.json", {
    cache: "no-store",
    headers: key ? { Authorization: `Bearer ${key}` } : {},
  });
  form.hidden = response.status !== 401;
  if (!response.ok) return;
  SwaggerUIBundle({
    spec: await response.json(),
    dom_id: "#swagger-ui",
    deepLinking: false,
    persistAuthorization: false,
    validatorUrl: null,
    requestInterceptor: (request) => {
      if (key && !request.headers.Authorization) request.headers.Authorization = `Bearer ${key}`;
      return request;
    },
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  show(document.getElementById("access-key").value.trim());
});

show("");
